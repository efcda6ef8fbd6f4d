"""Weights kept packed: each family computes with them what it computes with the same weights widened."""

import flax.traverse_util
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint
from checkpoint import families, orbax_folder
from checkpoint.placed import Storage, stored_as
from kernels import JoinedArray, QuantArray
from model import abstract_params, stacked
from parity.compare import forward
from quantization import SCHEMES, Scheme, quantize
from runtime import UserError
from tests.checkpoint import gguf_converter, small_model
from tests.parity import fixture as fixtures

F32 = jnp.dtype(jnp.float32)
NAMES = sorted(path.name for path in fixtures.FIXTURES.iterdir())
QUICK = ("llama3",)  # and below, gpt_oss as its file has it
TOKENS = np.arange(3, 40, dtype=np.int32) % 50
INT4 = Scheme("uint4", 16, symmetric=False)


def widened(loaded):
    """The tree with plain f32 arrays."""
    boxes = flax.traverse_util.flatten_dict(abstract_params(loaded.config), is_leaf=lambda _, leaf: hasattr(leaf, "names"))
    flat = flax.traverse_util.flatten_dict(loaded.params)
    return flax.traverse_util.unflatten_dict({at: stored_as(at, w, boxes[at], Storage(F32, F32, F32)) for at, w in flat.items()})


def packed_weights(params):
    flat = flax.traverse_util.flatten_dict(params, sep=".")
    return {name: w for name, w in flat.items() if isinstance(w, QuantArray | JoinedArray)}


def check_same_function(loaded):
    assert packed_weights(loaded.params)
    got, want = (forward(loaded.config, params, TOKENS)[0] for params in (loaded.params, widened(loaded)))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_every_family_computes_with_packed_weights(name, tmp_path):
    folder = fixtures.write_folder(fixtures.read(name), tmp_path / "model")
    plain = checkpoint.load(folder)
    loaded = checkpoint.load(folder, layers=SCHEMES["int8"], head=SCHEMES["int8"])
    check_same_function(loaded)
    error = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(a).max()), plain.params, widened(loaded))
    assert max(jax.tree.leaves(error)) <= 1 / 254 * 1.001  # half a step of the largest weight
    looped = checkpoint.load(folder, layers=SCHEMES["int8"], head=SCHEMES["int8"], layer_loop="scan")
    jax.tree.map(np.testing.assert_array_equal, looped.params, stacked(loaded.config, loaded.params, "scan"))


TYPES = {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0"}
TYPES |= {"ffn_down": "Q5_1", "token_embd": "Q8_0"}


@pytest.fixture
def write_mixed(tmp_path):
    """write(name, **types) -> path of a GGUF file of Llama's family, whose matrices are packed in several types."""
    config = small_model.config()
    model, rng = families.model_config(config, tmp_path), np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) * 0.2 for name, shape in small_model.shapes(model)}

    def write(name, **types):
        packed = {}
        for tensor, value in gguf_converter.converted(config, weights, "mla"):
            part = tensor.removesuffix(".weight")
            if kind := types.get(part.replace(".", "_"), TYPES.get(part.split(".")[-1])):
                kind = gguf.GGMLQuantizationType[kind]
                value = gguf.quants.quantize(np.asarray(value, np.float32), kind), kind
            packed[tensor] = value
        return gguf_converter.write(tmp_path / name, config, weights, tensors=packed)

    return write


@pytest.fixture
def mixed(write_mixed):
    return write_mixed("mixed.gguf")


def test_a_gguf_file_is_kept_as_it_is(mixed):
    plain, native = checkpoint.load(mixed), checkpoint.load(mixed, layers="native", head="native")
    jax.tree.map(np.testing.assert_array_equal, widened(native), plain.params)
    layer = native.params["layer_0"]
    assert isinstance(layer["attention"]["wqkv"], JoinedArray) and layer["mlp"]["w_gate_up"].code == "uint4"
    assert layer["attention"]["wo"].code == "uint5" and layer["mlp"]["w_down"].offsets is not None
    assert native.params["embedding"].code == "int8"
    check_same_function(native)
    held = sum(w.nbytes for w in packed_weights(native.params).values())
    stored = sum(info.num_bytes for info in checkpoint.open_gguf(mixed).tensors.values() if info.type.name[0] == "Q")
    assert held == stored


def test_experts_of_mxfp4_are_kept_as_they_are(tmp_path):
    folder = fixtures.write_folder(fixtures.read("gpt_oss_mxfp4"), tmp_path / "model")
    plain, native = checkpoint.load(folder), checkpoint.load(folder, layers="native")
    jax.tree.map(np.testing.assert_array_equal, widened(native), plain.params)
    assert native.params["layer_0"]["mlp"]["w_gate_up"].code == native.params["layer_0"]["mlp"]["w_down"].code == "float4"
    assert native.params["layer_0"]["mlp"]["w_down"].scales.dtype == jnp.float8_e8m0fnu
    check_same_function(native)


def test_layers_packed_in_different_ways_are_no_stack(write_mixed):
    assert "loop" in checkpoint.load(write_mixed("alike.gguf"), layers="native", layer_loop="scan").params
    path = write_mixed("other.gguf", blk_1_ffn_down="Q8_0")
    checkpoint.load(path, layers="native")
    with pytest.raises(UserError, match=r"w_down is packed in another way .*: use --layer_loop=unrolled, or --weights=bf16"):
        checkpoint.load(path, layers="native", layer_loop="scan")


def test_rounding_at_loading_is_rounding(mixed):
    plain, loaded = checkpoint.load(mixed).params["layer_0"], checkpoint.load(mixed, layers=INT4).params["layer_0"]
    D = plain["attention"]["wo"].shape[0]
    for got, want in (
        (loaded["attention"]["wo"], plain["attention"]["wo"].reshape(D, -1)),
        (loaded["attention"]["wqkv"], plain["attention"]["wqkv"]),
        (loaded["mlp"]["w_down"], plain["mlp"]["w_down"]),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, quantize(want, INT4))
    assert checkpoint.load(mixed, layers=INT4).params["embedding"].dtype == jnp.float32


OTHERS = [pytest.param(SCHEMES[name], marks=pytest.mark.slow, id=name) for name in ("w8a8", "fp8", "mxfp4")]


@pytest.mark.parametrize("how", ["native", INT4, *OTHERS], ids=str)
def test_a_folder_of_ours_keeps_weights_packed(mixed, tmp_path, how):
    saved = checkpoint.load(mixed, layers=how, head="native")
    orbax_folder.save(tmp_path / "saved", saved.config, saved.params, metadata={})
    again = checkpoint.load(tmp_path / "saved")
    assert jax.tree.structure(again.params) == jax.tree.structure(saved.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, saved.params)
    wide = checkpoint.load(tmp_path / "saved", layers=F32, head=F32)
    jax.tree.map(np.testing.assert_array_equal, wide.params, widened(saved))
    looped = checkpoint.load(tmp_path / "saved", layer_loop="scan")
    assert len(packed_weights(looped.params)) < len(packed_weights(saved.params))
    rounded = checkpoint.load(tmp_path / "saved", layers=SCHEMES["int8"])
    assert rounded.params["layer_0"]["mlp"]["w_down"].code == "int8"


def test_a_packed_folder_that_is_damaged_is_refused(mixed, tmp_path):
    saved = checkpoint.load(mixed, layers=INT4)
    orbax_folder.save(tmp_path / "saved", saved.config, saved.params, metadata={})
    path = tmp_path / "saved" / orbax_folder.MANIFEST
    text = path.read_text()
    assert '"code": "uint4"' in text and '"format_version": 2' in text
    path.write_text(text.replace('"code": "uint4"', '"code": "uint9"', 1))
    with pytest.raises(UserError, match=r"weight layer_0\.\S+ is not packed as it says"):
        checkpoint.load(tmp_path / "saved")
