"""Parts of weights: what each process of a mesh reads. A part is exactly that part of the whole, and little else is read for it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint
from checkpoint import families, gguf_names, tensors
from checkpoint.gguf_file import open_gguf
from checkpoint.load import _Chosen
from checkpoint.safetensors_folder import open_folder
from model import AttentionConfig, copied
from tests.checkpoint import gguf_converter
from tests.checkpoint.test_gguf_families import CASES, model
from tests.parity import fixture as fixtures

NAMES = sorted(path.name for path in fixtures.FIXTURES.iterdir())


class Counting:
    """A source that counts the numbers that are asked of it."""

    def __init__(self, source):
        self.source, self.read_numbers = source, 0

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, name, box=()):
        value = self.source.read(name, box)
        self.read_numbers += value.size
        return value


def of_folder(path):
    folder = open_folder(path)
    config = families.model_config(folder.config, path / "config.json")
    source = _Chosen(folder, config, folder.config.get("num_nextn_predict_layers") or 0)
    return config, source, tensors.NAMES.get(folder.config["model_type"], tensors.Names())


def halves(weight):
    """Indices that cut a weight in two along each axis, in unequal halves where they can be, and along all axes at once."""
    whole = tuple((0, size) for size in weight.shape)
    for axis, size in enumerate(weight.shape):
        middle = (size + 1) // 2
        for part in ((0, middle), (middle, size)):
            if part[0] < part[1]:
                yield (*whole[:axis], part, *whole[axis + 1 :])
    yield tuple((size // 2, size) for size in weight.shape)


def check_parts(weights, source):
    for weight in weights:
        whole = weight.cut(source, tuple((0, size) for size in weight.shape))
        assert whole.shape == weight.shape
        for index in halves(weight):
            part = weight.cut(source, index)
            np.testing.assert_array_equal(part, whole[tuple(slice(*each) for each in index)], err_msg=f"{weight.place} {index}")


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_that_part_of_the_whole_in_every_family(name, tmp_path):
    config, source, names = of_folder(fixtures.write_folder(fixtures.read(name), tmp_path / "model"))
    check_parts(tensors.weights(config, names, source), source)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_and_in_every_gguf_file(case, tmp_path):
    config, weights = model(case)
    file = open_gguf(gguf_converter.write(tmp_path / "model.gguf", config, weights, case.style))
    source = gguf_names.GGUFSource(file)
    config = families.model_config(gguf_names.config_keys(file), file.path)
    chosen = _Chosen(source, config, gguf_names.further_layers(file))
    check_parts(tensors.weights(config, source.table, chosen), chosen)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_of_two_reads_half_of_what_is_split(name, tmp_path):
    config, chosen, names = of_folder(fixtures.write_folder(fixtures.read(name), tmp_path / "model"))
    source = Counting(chosen)
    for weight in tensors.weights(config, names, source):
        for axis in sorted(weight.axes):
            if weight.shape[axis] % 2 or weight.shape[axis] < 2:
                continue
            source.read_numbers = 0
            half = tuple((0, size // 2 if axis == each else size) for each, size in enumerate(weight.shape))
            weight.cut(source, half)
            read, wanted = source.read_numbers, np.prod(weight.shape) // 2
            beside = ("w_uk", "w_uv")  # two weights of one tensor, whose rows are read for both
            assert read == wanted or weight.place[-1] in beside, (weight.place, axis, read, wanted)


def with_copies(config, times, padding):
    def more(attention):
        if not isinstance(attention, AttentionConfig) or attention.queries_per_kv % times:
            return attention
        return dataclasses.replace(attention, num_kv_heads=attention.num_kv_heads * times, kv_copies=times)

    layers = tuple(dataclasses.replace(layer, attention=more(layer.attention)) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, vocab_size=config.vocab_size + padding, vocab_padding=padding)


COPIED = ("llama3", "gpt_oss_mxfp4", "qwen3_moe", "deepseek_v3", "deepseek_v32")  # every layout of the axes that are fitted


@pytest.mark.parametrize("name", [name if name in COPIED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_copied_heads_and_a_padded_vocabulary_are_the_same_from_files_as_on_the_device(name, tmp_path):
    """Both ways that a model is fitted to a mesh: from the tensors, and (of an Orbax checkpoint) from the finished parameters."""
    folder = fixtures.write_folder(fixtures.read(name), tmp_path / "model")
    config, source, names = of_folder(folder)
    fitted = with_copies(config, 2, 3)
    on_device = copied(config, fitted, checkpoint.load(folder).params)
    for weight in tensors.weights(fitted, names, source):
        whole = weight.cut(source, tuple((0, size) for size in weight.shape)).astype(np.float32)
        want = on_device
        for key in weight.place:
            want = want[key]
        np.testing.assert_array_equal(whole, np.asarray(want), err_msg=str(weight.place))
    check_parts(tensors.weights(fitted, names, source), source)


def test_a_file_whose_blocks_do_not_end_where_a_part_does(tmp_path):
    """Columns 48..80 of rows of blocks of 32: blocks 1 and 2 are read, and cut."""
    rng = np.random.default_rng(0)
    import gguf

    values = rng.standard_normal((6, 128), np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    from tests.checkpoint.test_gguf_file import write_gguf

    file = open_gguf(write_gguf(tmp_path / "t.gguf", tensors={"w": (packed, gguf.GGMLQuantizationType.Q8_0)}))
    whole = file.dequantize("w")
    for rows, (start, stop) in itertools.product((slice(None), slice(2, 5)), ((48, 80), (0, 1), (96, 128), (31, 33))):
        np.testing.assert_array_equal(file.dequantize("w", (rows, slice(start, stop))), whole[rows, start:stop])


def test_stacked_layers_are_the_layers(tmp_path):
    folder = fixtures.write_folder(fixtures.read("gemma3"), tmp_path / "model")
    plain, looped = checkpoint.load(folder), checkpoint.load(folder, layer_loop="scan")
    from model import stacked

    want = stacked(plain.config, plain.params, "scan")
    assert jax.tree.structure(want) == jax.tree.structure(looped.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), want, looped.params)
    assert any(leaf.shape[0] > 1 for leaf in jax.tree.leaves(looped.params["loop"])) and jnp.isfinite(want["embedding"]).all()
