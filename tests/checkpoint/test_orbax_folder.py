"""Orbax folders: bit-exact round trips into any sharding, written whole or not at all, and one line for everything that is wrong."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import linen as nn

from checkpoint.orbax_folder import describe, is_checkpoint, load, save
from model import LayerConfig, MLPConfig, abstract_params
from runtime import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tiny_config):
    """An untied head, two kinds of layers, nothing longer than 64."""
    attention = dataclasses.replace(tiny_config.layers[0].attention, rope=None)
    layers = (*tiny_config.layers[:1], LayerConfig(attention, MLPConfig(hidden=32)))
    return dataclasses.replace(tiny_config, vocab_size=64, layers=layers, tie_embeddings=False)


@pytest.fixture(scope="module")
def params(config):
    """Every other weight in bf16; the values that comparisons and conversions like to lose are in."""
    odd = jnp.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 3.3895314e38], jnp.float32)
    leaves, structure = jax.tree.flatten(nn.meta.unbox(abstract_params(config)))
    rng = np.random.default_rng(3)
    values = [jnp.array(rng.normal(size=leaf.shape), (jnp.float32, jnp.bfloat16)[i % 2]) for i, leaf in enumerate(leaves)]
    tree = jax.tree.unflatten(structure, values)
    return tree | {"head": tree["head"].at[0, : len(odd)].set(odd)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, config, params):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(folder, config, params, metadata={"source": "a toy"}, add_files=lambda unfinished: (unfinished / "tokens.txt").write_text("a b"))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint of one's own, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def bits(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes()), tree)


def rewrite(folder, change):
    path = folder / "diptych.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def test_a_model_comes_back_bit_for_bit(saved, config, params):
    loaded_config, loaded = load(saved)
    assert loaded_config == config
    assert bits(loaded) == bits(params)


def test_the_manifest_says_what_the_folder_holds(saved, config, params):
    manifest = describe(saved)
    assert manifest.config == config
    assert manifest.metadata == {"source": "a toy"}
    w_down = params["layer_1"]["mlp"]["w_down"]
    assert manifest.weights["layer_1.mlp.w_down"] == jax.ShapeDtypeStruct(w_down.shape, w_down.dtype)
    assert len(manifest.weights) == len(jax.tree.leaves(params))
    on_disk = {path.relative_to(saved).as_posix(): path.stat().st_size for path in saved.rglob("*") if path.is_file()}
    del on_disk["diptych.json"]
    assert {name: size for name, (size, _) in manifest.files.items()} == on_disk
    assert (saved / "tokens.txt").read_text() == "a b"


def test_a_checkpoint_is_known_by_its_manifest(saved, tmp_path):
    assert is_checkpoint(saved) and is_checkpoint(str(saved))
    assert not is_checkpoint(tmp_path) and not is_checkpoint(tmp_path / "missing") and not is_checkpoint(saved / "tokens.txt")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_are_converted_as_astype_does_it(saved, params, dtype):
    _, loaded = load(saved, dtype)
    for leaf in jax.tree.leaves(loaded):
        assert leaf.dtype == (jnp.float32 if leaf.ndim == 1 else dtype)

    def equal(a, b):
        return np.array_equal(a.astype(jnp.float32), b.astype(a.dtype).astype(jnp.float32), equal_nan=True)

    assert all(jax.tree.leaves(jax.tree.map(equal, loaded, params)))  # all bits but the spare ones of a nan


def test_numpy_weights_are_saved_as_they_are(tmp_path, config, params):
    save(tmp_path / "model", config, jax.tree.map(np.asarray, params), metadata={})
    assert bits(load(tmp_path / "model")[1]) == bits(params)


def test_weights_restore_into_the_shardings_of_a_mesh(saved, tmp_path):
    program = textwrap.dedent("""
        import sys
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from checkpoint import orbax_folder
        from runtime import UserError

        assert len(jax.devices()) == 4
        config, plain = orbax_folder.load(sys.argv[1])
        assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(plain))

        def spread(leaf):  # the longest axis that divides over the devices of an axis
            axes = [axis for axis, size in enumerate(leaf.shape) if size % 4 == 0]
            axis = max(axes, key=lambda axis: leaf.shape[axis])
            return NamedSharding(mesh, PartitionSpec(*[("x", "y") if each == axis else None for each in range(leaf.ndim)]))

        mesh = jax.make_mesh((2, 2), ("x", "y"))
        shardings = jax.tree.map(spread, plain)
        _, sharded = orbax_folder.load(sys.argv[1], shardings=shardings)

        def compare(a, b, sharding):
            assert b.sharding == sharding, (b.sharding, sharding)
            assert {shard.data.size for shard in b.addressable_shards} == {a.size // 4}
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype

        jax.tree.map(compare, plain, sharded, shardings)
        everywhere = NamedSharding(mesh, PartitionSpec())
        _, copies = orbax_folder.load(sys.argv[1], shardings=everywhere)  # one for all
        assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(copies))
        orbax_folder.save(sys.argv[2], config, sharded, metadata={})
        jax.tree.map(lambda a, b: compare(a, b, b.sharding), plain, orbax_folder.load(sys.argv[2], shardings=shardings)[1])
        thirds = NamedSharding(jax.make_mesh((3,), ("z",), devices=jax.devices()[:3]), PartitionSpec("z"))
        try:
            orbax_folder.load(sys.argv[1], shardings=thirds)
        except UserError as error:
            print(error)
    """)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "32", "JAX_PLATFORMS": "cpu"}
    again = tmp_path / "again"
    command = [sys.executable, "-c", program, str(saved), str(again)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("weight embedding can't be sharded like that:")
    _, gathered = load(again)  # saved sharded, restored on one device
    assert bits(gathered) == bits(load(saved)[1])


@pytest.mark.parametrize("name", ["new/and/nested", "empty"])
def test_a_folder_that_is_not_there_or_empty_is_filled(tmp_path, config, params, name):
    (tmp_path / "empty").mkdir()
    save(str(tmp_path / name), config, params, metadata={})
    assert is_checkpoint(tmp_path / name)
    assert not list(tmp_path.rglob("*.partial-*"))


def test_paths_may_be_relative_or_begin_with_a_tilde(tmp_path, config, params, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    save("here", config, params, metadata={})
    assert load("here")[0] == load("~/here")[0] == config


def test_what_is_there_is_never_written_over(tmp_path, copy, config, params):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"copy exists and is not empty: give a new folder"):
        save(copy, config, params, metadata={})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"file exists and is a file"):
        save(tmp_path / "file", config, params, metadata={})
    with pytest.raises(UserError, match=r"can't be written \(.*\): give a folder"):
        save(tmp_path / "file" / "below", config, params, metadata={})
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_filled_meanwhile_is_left_alone(tmp_path, config, params):
    def somebody_else(_):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    with pytest.raises(UserError, match=r"model can't be written \(Directory not empty\)"):
        save(tmp_path / "model", config, params, metadata={}, add_files=somebody_else)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "theirs"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_save_that_fails_leaves_nothing(tmp_path, config, params, error):
    def failing(_):
        raise error

    with pytest.raises((KeyboardInterrupt, UserError)):
        save(tmp_path / "model", config, params, metadata={}, add_files=failing)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_orbax_is_one_line(tmp_path, config, params, monkeypatch):
    def failing(*_, **__):
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "d/1": No space left [tensorstore_spec=\'{"base":1}\']')

    monkeypatch.setattr(orbax.checkpoint.PyTreeCheckpointer, "save", failing)
    with pytest.raises(UserError, match=r"can't be written \(RESOURCE_EXHAUSTED: .* No space left\): free some space"):
        save(tmp_path / "model", config, params, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_a_killed_save_leaves_no_checkpoint(tmp_path, saved):
    program = textwrap.dedent("""
        import os, signal, sys
        from checkpoint import orbax_folder

        config, params = orbax_folder.load(sys.argv[1])
        kill = lambda unfinished: os.kill(os.getpid(), signal.SIGKILL)
        orbax_folder.save(sys.argv[2], config, params, metadata={}, add_files=kill)
    """)
    command = [sys.executable, "-c", program, str(saved), str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "model").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("model.partial-")
    for folder in (left, left / "model"):
        with pytest.raises(UserError, match=r"has no diptych\.json"):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.pop("head"), "the parameter tree lacks weight head"),
        (lambda tree: tree["layer_0"].pop("mlp"), r"lacks weight layer_0\.mlp\.w_down and 1 more"),
        (lambda tree: tree.update(bias=jnp.zeros(3)), "holds, which the config has no use for, weight bias"),
        (lambda tree: tree.update(head=jnp.zeros((64, 47))), r"weight head has shape \(64, 47\), but the config says \(64, 48\)"),
    ],
)
def test_parameters_of_another_model_are_not_saved(tmp_path, config, params, change, message):
    tree = jax.tree.map(lambda leaf: leaf, params)
    change(tree)
    with pytest.raises(UserError, match=message):
        save(tmp_path / "model", config, tree, metadata={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": float("nan")}, {"a": {1, 2}}])
def test_metadata_that_json_can_not_hold_are_refused_first(tmp_path, config, params, metadata):
    with pytest.raises((TypeError, ValueError)):
        save(tmp_path / "model", config, params, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_processes_does_not_save(tmp_path, config, params, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="this is one of 2"):
        save(tmp_path / "model", config, params, metadata={})


def test_what_is_no_checkpoint_is_told_apart(tmp_path, saved):
    for folder, message in [
        (tmp_path / "missing", r"missing does not exist: give the folder"),
        (saved / "tokens.txt", r"tokens\.txt is a file"),
        (tmp_path, r"is no checkpoint of Diptych, as it has no diptych\.json"),
        (saved / "params", r"params is an Orbax checkpoint but has no diptych\.json"),
    ]:
        with pytest.raises(UserError, match=message):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.update(format_version=3), r"has format version 3, and .* reads up to 2: update Diptych"),
        (lambda stored: stored.update(format_version="1"), "its format version is '1'"),
        (lambda stored: stored.update(format_version=True), "its format version is True"),
        (lambda stored: stored.update(format_version=0), "its format version is 0"),
        (lambda stored: stored.pop("format_version"), "its format version is None"),
        (lambda stored: stored.pop("config"), "is damaged: KeyError 'config'"),
        (lambda stored: stored.pop("files"), "is damaged: KeyError 'files'"),
        (lambda stored: stored.update(files=[1]), "is damaged: AttributeError"),
        (lambda stored: stored["files"].update(x=[1]), "is damaged: ValueError"),
        (lambda stored: stored.update(metadata=3), "is damaged: TypeError"),
        (lambda stored: stored["weights"]["head"].update(dtype="float33"), "is damaged: TypeError .*float33"),
        (lambda stored: stored["config"].update(novelty=1), r"diptych\.json is no model .* unknown field 'novelty'"),
        (lambda stored: stored["weights"].pop("head"), r"diptych\.json lacks weight head"),
        (lambda stored: stored["weights"].update(bias={"shape": [3], "dtype": "float32"}), "has no use for, weight bias"),
        (lambda stored: stored["config"].update(tie_embeddings=True), "has no use for, weight head"),
        (lambda stored: stored["files"].update({"extra.bin": [1, 2]}), r"extra\.bin is missing .* incomplete"),
        (lambda stored: stored["weights"]["head"].pop("shape"), "is damaged: KeyError 'shape'"),
        (lambda stored: stored["weights"]["head"].update(shape="ab"), r"weight head has shape \('a', 'b'\)"),
        (lambda stored: stored["config"].update(vocab_size=65), r"weight embedding has shape \(64, 48\), but the config says \(65, 48\)"),
    ],
)
def test_a_manifest_that_is_wrong_is_told_by_what_is_wrong(copy, change, message):
    rewrite(copy, change)
    with pytest.raises(UserError, match=message) as caught:
        load(copy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3", "null", '{"format_version": 1', "\udcff"])
def test_a_manifest_that_is_no_json_is_damaged(copy, text):
    (copy / "diptych.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"diptych\.json is damaged: .*; convert the model again"):
        load(copy)


def test_damage_to_any_file_is_told_with_its_name(copy):
    names = sorted(describe(copy).files)
    assert len(names) > 5
    for name in names:
        path, whole = copy / name, (copy / name).read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            load(copy)
        path.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=f"{name} is damaged: it has {len(whole) - 1} bytes, and {len(whole)} were written"):
            load(copy, verify=False)
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(UserError, match=f"{name} is damaged: it is not what was written"):
            load(copy)
        path.write_bytes(whole)
    load(copy)


def test_what_orbax_refuses_is_one_line(copy, params):
    """The files are whole, but not those of the manifest's model."""
    shutil.rmtree(copy / "params")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(copy / "params", {name: leaf for name, leaf in params.items() if name != "head"})
    rewrite(copy, lambda stored: stored.update(files={}))
    with pytest.raises(UserError, match=r"params can't be restored \(User-provided restore item") as caught:
        load(copy)
    assert len(str(caught.value)) < 700


def test_reading_the_manifest_does_not_import_orbax():
    program = "import sys, checkpoint.orbax_folder; sys.exit('orbax.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 0
