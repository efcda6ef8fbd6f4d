"""Weights on a mesh are those of one device, in every family; a prompt's answer is the same, and two runs compile nothing twice."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import checkpoint
import kv
import sampling
from checkpoint import orbax_folder
from model import Transformer, abstract_params, copied, fit, prefill, stacked, tree_names
from parity.compare import forward
from quantization import SCHEMES
from runtime import LEDGER, UserError
from sharding import Placement, is_names, make_mesh, parse_mesh
from tests.parity import fixture as fixtures

NAMES = sorted(path.name for path in fixtures.FIXTURES.iterdir())


def mesh_of(text):
    sizes = parse_mesh(text)
    return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


def check_equal(config, params, loaded, placement, layer_loop):
    fitted = fit(config, placement)
    assert loaded.config == fitted
    boxes = abstract_params(fitted, layer_loop=layer_loop)
    want = stacked(fitted, copied(config, fitted, params), layer_loop)

    def check(box, got, wanted):
        assert got.sharding.is_equivalent_to(placement.sharding(box.names), got.ndim)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))

    jax.tree.map(check, boxes, loaded.params, want, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


QUICK = {"gemma3", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_files_are_loaded_into_a_mesh(name, tmp_path):
    folder = fixtures.write_folder(fixtures.read(name), tmp_path / "model")
    plain, checked = checkpoint.load(folder), 0
    for text, layer_loop in (("model=2", "unrolled"), ("model=4", "scan"), ("fsdp=2,model=2", "unrolled"), ("expert=2", "scan")):
        placement = Placement.on(mesh_of(text))
        try:
            fit(plain.config, placement)
        except UserError:
            continue
        check_equal(plain.config, plain.params, checkpoint.load(folder, placement=placement, layer_loop=layer_loop), placement, layer_loop)
        checked += 1
    assert checked


@pytest.mark.parametrize("name", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "qwen2"))])
def test_an_orbax_checkpoint_is_restored_into_any_mesh(name, tmp_path):
    plain = checkpoint.load(fixtures.write_folder(fixtures.read(name), tmp_path / "model"))
    orbax_folder.save(tmp_path / "saved", plain.config, plain.params, metadata={})
    for text, layer_loop in (("model=2", "unrolled"), ("model=4", "scan"), ("data=2", "scan")):
        placement = Placement.on(mesh_of(text))
        loaded = checkpoint.load(tmp_path / "saved", placement=placement, layer_loop=layer_loop)
        check_equal(plain.config, plain.params, loaded, placement, layer_loop)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize("name", ["llama3", *SLOW])
def test_packed_weights_are_split_like_others(name, tmp_path):
    """Rounded while they are read, or restored from a folder of ours: the same codes and scales wherever they lie, and the same logits."""
    folder, int8 = fixtures.write_folder(fixtures.read(name), tmp_path / "model"), SCHEMES["int8"]
    plain = checkpoint.load(folder, layers=int8, head=int8)
    orbax_folder.save(tmp_path / "saved", plain.config, plain.params, metadata={})
    wanted = forward(plain.config, plain.params, np.arange(3, 20, dtype=np.int32))[0]
    for text, layer_loop in (("model=2", "unrolled"), ("model=4", "scan"), ("fsdp=2,model=2", "unrolled"), ("expert=2", "scan")):
        placement = Placement.on(mesh_of(text))
        try:
            fitted = fit(plain.config, placement)
        except UserError:
            continue
        boxes = abstract_params(fitted, layer_loop=layer_loop)
        want = stacked(fitted, copied(plain.config, fitted, plain.params), layer_loop)
        for path in (folder, tmp_path / "saved"):
            schemes = {"layers": int8, "head": int8} if path == folder else {}
            loaded = checkpoint.load(path, placement=placement, layer_loop=layer_loop, **schemes)
            names = jax.tree.leaves(tree_names(loaded.params, boxes), is_leaf=is_names)
            for axes, got, value in zip(names, jax.tree.leaves(loaded.params), jax.tree.leaves(want), strict=True):
                assert got.sharding.is_equivalent_to(placement.sharding(axes), got.ndim)
                np.testing.assert_array_equal(np.asarray(got), np.asarray(value))
            rows = np.asarray(placed_forward(loaded, placement, layer_loop))
            np.testing.assert_allclose(rows[:, : wanted.shape[1]], wanted, atol=1e-4 * np.abs(wanted).max())


def placed_forward(loaded, placement, layer_loop):
    """Logits [T, V] of the whole forward on the mesh, of two equal rows' first."""
    tokens = np.tile(np.arange(3, 20, dtype=np.int32), (2, 1))
    cache = kv.init(loaded.config, 2, 32, kv.Format.for_platform("cpu", np.float32), None, placement)
    model = Transformer(loaded.config, layer_loop=layer_loop)
    count, zero = np.full((2,), 17, np.int32), np.zeros((2,), np.int32)
    return prefill(model, loaded.params, cache, tokens, count, None, zero, logits="all")[0][0]


PROMPTS, TOKENS = ["Why is the sky blue?", "Name three colours."], 16


@pytest.fixture(scope="module")
def alone():
    lm = sampling.load(weights="f32", compute="f32", kv_dtype="f32")
    return [answer.tokens for answer in sampling.generate(lm, PROMPTS, max_new_tokens=TOKENS)]


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("model=3", {}),
        pytest.param("data=2", {}, marks=pytest.mark.slow),
        pytest.param("data=2,model=3", {"cache": "paged", "layer_loop": "scan"}, marks=pytest.mark.slow),
        pytest.param("seq=4", {}, marks=pytest.mark.slow),
    ],
)
def test_smollm2_answers_the_same_over_a_mesh_and_compiles_nothing_twice(alone, mesh, settings):
    lm = sampling.load(weights="f32", compute="f32", kv_dtype="f32", mesh=mesh_of(mesh), **settings)
    assert [answer.tokens for answer in sampling.generate(lm, PROMPTS, max_new_tokens=TOKENS)] == alone
    mark = len(LEDGER.entries)
    sampling.generate(lm, ["Why is the sky red?", "Name three trees."], max_new_tokens=TOKENS, temperature=0.8, seed=1)
    assert not LEDGER.programs(mark)
