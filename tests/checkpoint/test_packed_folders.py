"""Whole folders of GPTQ and AWQ: kept packed, they give the logits of their dequantized form, with one device and in a stack."""

import json

import flax.traverse_util
import numpy as np
import pytest

import checkpoint
from checkpoint import families
from kernels import QuantArray
from parity.compare import forward
from tests.checkpoint import packed_writers as writers
from tests.checkpoint import small_model
from tests.checkpoint.conftest import safetensors

GROUP = 32
TOKENS = np.arange(3, 40, dtype=np.int32)
QUANTIZATION = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "act_order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}


@pytest.fixture
def write(tmp_path):
    """write(kind, pack) -> a folder, and its matrices in f32 by name."""

    def write(kind, pack):
        config = small_model.config() | {"quantization_config": QUANTIZATION[kind]}
        model, rng = families.model_config(config, tmp_path), np.random.default_rng(0)
        orders = {width: rng.permutation(width) // GROUP for width in (64, 96)}  # of each input, its group: one for all that share inputs
        stored, plain = {}, {}
        for name, shape in small_model.shapes(model):
            if "_proj" not in name:
                stored[name] = plain[name] = rng.normal(size=shape).astype(np.float32)
                continue
            out, width = shape
            codes, zeros = rng.integers(0, 16, shape, dtype=np.uint8), rng.integers(4, 12, (out, width // GROUP), dtype=np.uint8)
            scales = rng.uniform(0.01, 0.05, zeros.shape).astype(np.float16)
            groups = orders[width] if kind == "act_order" else np.arange(width) // GROUP
            plain[name] = (codes - zeros[:, groups].astype(np.float32)) * scales[:, groups].astype(np.float32)
            if kind == "awq":
                pieces = writers.awq(codes, scales, zeros, pack)
            else:
                pieces = writers.gptq(codes, scales, zeros, 4, kind != "gptq_v2", groups, pack)
            stored |= {f"{name.removesuffix('weight')}{piece}": value for piece, value in pieces.items()}
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(safetensors(stored))
        return folder, plain

    return write


@pytest.mark.parametrize(
    "pack", [writers.by_shifts, pytest.param(writers.bit_by_bit, marks=pytest.mark.slow)], ids=lambda pack: pack.__name__
)
@pytest.mark.parametrize("kind", QUANTIZATION)
def test_logits_are_those_of_the_dequantized_folder(write, tmp_path, kind, pack):
    folder, plain = write(kind, pack)
    native, wide = checkpoint.load(folder, layers="native"), checkpoint.load(folder)
    packed = [w for w in flax.traverse_util.flatten_dict(native.params).values() if isinstance(w, QuantArray)]
    assert len(packed) == 4 * len(native.config.layers)
    assert all((w.order is not None) == (kind == "act_order") and w.scales.dtype == np.float16 for w in packed)
    want = forward(wide.config, wide.params, TOKENS)[0]
    np.testing.assert_allclose(forward(native.config, native.params, TOKENS)[0], want, atol=1e-4 * np.abs(want).max())
    down = wide.params["layer_0"]["mlp"]["w_down"]
    np.testing.assert_allclose(down, plain["model.layers.0.mlp.down_proj.weight"], rtol=1e-6, atol=1e-7)
    looped = checkpoint.load(folder, layers="native", layer_loop="scan")
    assert set(looped.params) == {"embedding", "final_norm", "loop"} | ({"head"} & set(native.params))
