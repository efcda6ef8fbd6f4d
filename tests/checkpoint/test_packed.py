"""Packed weights: against what their own libraries make of them, against packers written here, and what must be refused."""

import base64
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import open_folder, packed
from runtime import UserError

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "packed_weights.json").read_text(encoding="utf-8"))["cases"]
KINDS = {
    "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def golden_tensors(case):
    return {
        name: np.frombuffer(base64.b64decode(tensor["data"]), KINDS[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in case["tensors"].items()
    }


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_a_weight_has_the_values_that_its_own_library_gives(write_folder, case):
    """compressed-tensors, transformers and GPTQModel packed these weights and unpacked them again, in f32."""
    source = open_folder(write_folder(golden_tensors(case), case["quantization_config"]))
    want = np.frombuffer(base64.b64decode(case["values"]), np.float32).reshape(case["shape"])
    name = case["weight"]
    assert source.names() == {name} and source.shape(name) == want.shape
    got = source.read(name)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    for start, stop in ((0, 1), (1, len(want)), (1, 2), (2, 2)):
        np.testing.assert_array_equal(source.read_rows(name, start, stop), got[start:stop])


def bit_stream(numbers, bits):
    """Rows of numbers as rows of int32 words, through Python's integers: number i stands at bit i * bits."""
    count = -(-numbers.shape[1] * bits // 32)
    whole = [sum(int(number) << (index * bits) for index, number in enumerate(row)) for row in numbers]
    return np.array([[(value >> (32 * word)) & 0xFFFFFFFF for word in range(count)] for value in whole], np.uint32).view(np.int32)


@given(
    bits=st.integers(1, 8),
    numbers=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=3),
)
def test_bits_come_out_as_they_went_in(bits, numbers):
    width = min(map(len, numbers))
    numbers = np.array([row[:width] for row in numbers], np.uint8) & (2**bits - 1)
    np.testing.assert_array_equal(packed.unpack_bits(bit_stream(numbers, bits), bits, width), numbers)


def by_element(codes, scales, zeros, group_of):
    """The formula, one element at a time. codes [out, in]; scales, zeros [out, groups]."""
    out = np.empty(codes.shape, np.float32)
    for row, column in np.ndindex(*codes.shape):
        group = group_of[column]
        out[row, column] = (np.float32(codes[row, column]) - np.float32(zeros[row, group])) * np.float32(scales[row, group])
    return out


ROUND_TRIP = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32 - 1)


def integers(rng, bits, *shape):
    return rng.integers(0, 2**bits, shape, dtype=np.uint8)


def positive(rng, *shape, dtype=np.float16):
    return rng.uniform(0.01, 1, shape).astype(dtype)


@ROUND_TRIP
@given(
    bits=st.sampled_from([2, 3, 4, 8]), groups=st.integers(1, 3), rows=st.integers(1, 3), v2=st.booleans(), act=st.booleans(), seed=SEEDS
)
def test_gptq_round_trip(write_folder, bits, groups, rows, v2, act, seed):
    rng = np.random.default_rng(seed)
    size, out = 32, 32 * rows
    width = size * groups
    codes, zeros, scales = integers(rng, bits, out, width), integers(rng, bits, out, groups), positive(rng, out, groups)
    g_idx = np.arange(width, dtype=np.int32) // size
    g_idx = rng.permutation(g_idx) if act else g_idx
    kept = zeros if v2 else (zeros.astype(int) - 1) % 2**bits
    tensors = {
        "x.qweight": np.ascontiguousarray(bit_stream(codes, bits).T),
        "x.qzeros": bit_stream(kept.T, bits),
        "x.scales": np.ascontiguousarray(scales.T),
        "x.bias": np.zeros(out, np.float16),
    }
    if act or seed % 2:
        tensors["x.g_idx"] = g_idx
    method = {"quant_method": "gptq", "bits": bits, "group_size": size if groups > 1 else -1, "desc_act": act}
    source = open_folder(write_folder(tensors, {**method, **({"checkpoint_format": "gptq_v2"} if v2 else {})}))
    assert source.names() == {"x.weight", "x.bias"}
    assert source.stored("x.weight") == f"GPTQ int{bits} g32" + (" act-order" if act else "")
    np.testing.assert_array_equal(source.read("x.weight"), by_element(codes, scales, zeros, g_idx))
    np.testing.assert_array_equal(source.read_rows("x.weight", 3, 9), source.read("x.weight")[3:9])


@ROUND_TRIP
@given(groups=st.integers(1, 3), words=st.integers(1, 4), start=st.integers(0, 8), seed=SEEDS)
def test_awq_round_trip(write_folder, groups, words, start, seed):
    rng = np.random.default_rng(seed)
    size, out = 16, 8 * words
    width = size * groups
    codes, zeros, scales = integers(rng, 4, out, width), integers(rng, 4, out, groups), positive(rng, out, groups)

    def pack(numbers):  # [out, n] -> [n, out / 8]
        return bit_stream(numbers.T.reshape(-1, words, 8)[:, :, AWQ_ORDER].reshape(-1, out), 4)

    tensors = {"x.qweight": pack(codes), "x.qzeros": pack(zeros), "x.scales": np.ascontiguousarray(scales.T)}
    source = open_folder(write_folder(tensors, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "GEMM"}))
    want = by_element(codes, scales, zeros, np.arange(width) // size)
    assert source.stored("x.weight") == "AWQ int4 g16"
    np.testing.assert_array_equal(source.read("x.weight"), want)
    np.testing.assert_array_equal(source.read_rows("x.weight", start, out), want[start:])


def compressed(format, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


@ROUND_TRIP
@given(
    bits=st.sampled_from([2, 4, 8]),
    out=st.integers(1, 9),
    width=st.integers(1, 40),
    size=st.sampled_from([-1, 8, 16]),
    zeros=st.sampled_from(["none", "packed", "int8"]),
    act=st.booleans(),
    seed=SEEDS,
)
def test_pack_quantized_round_trip(write_folder, bits, out, width, size, zeros, act, seed):
    rng = np.random.default_rng(seed)
    block = width if size == -1 else size
    groups = -(-width // block)
    codes, scales = integers(rng, bits, out, width), positive(rng, out, groups, dtype=np.float32)
    offset = np.full((out, groups), 2 ** (bits - 1), np.uint8) if zeros == "none" else integers(rng, bits, out, groups)
    g_idx = np.arange(width, dtype=np.int32) // block
    tensors = {
        "m.x.weight_packed": bit_stream(codes, bits),
        "m.x.weight_scale": scales,
        "m.x.weight_shape": np.array([out, width]),
        "m.lm_head.weight": np.ones((2, 2), ml_dtypes.bfloat16),
    }
    if zeros == "packed":
        tensors["m.x.weight_zero_point"] = np.ascontiguousarray(bit_stream(offset.T, bits).T)
    if zeros == "int8":
        tensors["m.x.weight_zero_point"] = (offset.astype(int) - 2 ** (bits - 1)).astype(np.int8)
    if act:
        g_idx = rng.permutation(g_idx)
        tensors["m.x.weight_g_idx"] = g_idx
    source = open_folder(
        write_folder(tensors, compressed("pack-quantized", num_bits=bits, type="int", symmetric=zeros == "none", group_size=size))
    )
    assert source.names() == {"m.x.weight", "m.lm_head.weight"}
    np.testing.assert_array_equal(source.read("m.x.weight"), by_element(codes, scales, offset, g_idx))


@ROUND_TRIP
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    lead=st.sampled_from([(), (2,)]),
    kind=st.sampled_from(["F8_E4M3", "F8_E5M2"]),
    suffix=st.sampled_from(["_scale_inv", "_scale"]),
    seed=SEEDS,
)
def test_float8_blocks_round_trip(write_folder, shape, block, lead, kind, suffix, seed):
    """Blocks that are cut short at both edges, and fused experts."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((*lead, *shape)).astype(KINDS[kind])
    scales = positive(rng, *lead, -(-shape[0] // block[0]), -(-shape[1] // block[1]), dtype=np.float32)
    tensors = {"x.weight": weight, f"x.weight{suffix}": scales, "x.input_scale": np.ones(1, np.float32)}
    source = open_folder(write_folder(tensors, {"quant_method": "fp8", "weight_block_size": list(block)}))
    assert source.names() == {"x.weight"} and source.stored("x.weight").startswith(kind)
    want = weight.astype(np.float32)
    for at in np.ndindex(*want.shape):
        want[at] *= scales[(*at[:-2], at[-2] // block[0], at[-1] // block[1])]
    np.testing.assert_array_equal(source.read("x.weight"), want)
    np.testing.assert_array_equal(source.read_rows("x.weight", 1, len(want)), want[1:])


@pytest.mark.parametrize("block, words", [([128, 128], "block 128"), ([1, 32], "block 1x32"), (None, "per tensor")])
def test_float8_is_described_by_its_blocks(write_folder, block, words):
    shape = (2, 64) if block is None else (200, 300)
    scales = np.ones(() if block is None else (-(-200 // block[0]), -(-300 // block[1])), np.float32)
    tensors = {"x.weight": np.ones(shape, KINDS["F8_E4M3"]), "x.weight_scale_inv": scales}
    source = open_folder(write_folder(tensors, {"quant_method": "fp8", "weight_block_size": block}))
    assert source.stored("x.weight") == f"F8_E4M3 {words}"


@pytest.mark.parametrize("scale_shape", [(3,), (3, 1), (), (1,), (1, 1)])
def test_float8_with_a_scale_per_row_or_tensor(write_folder, scale_shape):
    weight = np.arange(12).reshape(3, 4).astype(KINDS["F8_E4M3"])
    scale = np.arange(1, 1 + np.prod(scale_shape, dtype=int), dtype=np.float32).reshape(scale_shape)
    tensors = {"x.weight": weight, "x.weight_scale": scale}
    source = open_folder(write_folder(tensors, {"quant_method": "fp8", "weight_block_size": None}))
    np.testing.assert_array_equal(source.read("x.weight"), weight.astype(np.float32) * scale.reshape(-1, 1))


def test_one_float8_scale_for_all_experts(write_folder):
    weight = np.arange(12).reshape(3, 2, 2).astype(KINDS["F8_E4M3"])
    tensors = {"experts.down_proj": weight, "experts.down_proj_scale_inv": np.full(1, 0.5, np.float32)}
    source = open_folder(write_folder(tensors, {"quant_method": "fp8", "weight_block_size": None}))
    np.testing.assert_array_equal(source.read_rows("experts.down_proj", 1, 3), weight[1:].astype(np.float32) / 2)


def test_float8_without_quantization_config_is_known_by_its_scales(write_folder):
    tensors = {"x.weight": np.full((2, 3), 4, KINDS["F8_E5M2"]), "x.weight_scale_inv": np.full((1, 1), 0.25, np.float32)}
    np.testing.assert_array_equal(open_folder(write_folder(tensors)).read("x.weight"), np.ones((2, 3), np.float32))


def test_the_experts_of_mxfp4_lie_the_way_their_bfloat16_files_have_them(write_folder):
    """[E, in, out], though they are stored [E, out, in / 32, 16]; of two values the low nibble is the first."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 5, 2), dtype=np.uint8)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, "e.down_proj_bias": np.ones((3, 5), ml_dtypes.bfloat16)}
    source = open_folder(write_folder(tensors))
    assert source.names() == {"e.down_proj", "e.down_proj_bias"} and source.stored("e.down_proj") == "MXFP4"
    assert source.shape("e.down_proj") == (3, 64, 5)
    got = source.read("e.down_proj")
    for expert, column, place in np.ndindex(3, 64, 5):
        block, within = divmod(column, 32)
        byte = blocks[expert, place, block, within // 2]
        code = byte & 15 if within % 2 == 0 else byte >> 4
        assert got[expert, column, place] == E2M1[code] * 2.0 ** (int(scales[expert, place, block]) - 127)
    np.testing.assert_array_equal(source.read_rows("e.down_proj", 2, 3), got[2:])


def test_the_extreme_powers_of_two():
    np.testing.assert_array_equal(
        packed.exponents(np.array([0, 127, 254], np.uint8)).astype(np.float32), np.array([2.0**-127, 1, 2.0**127], np.float32)
    )
    assert np.isnan(packed.exponents(np.array([255], np.uint8)).astype(np.float32))


def test_each_module_has_the_scheme_of_the_most_exact_target(write_folder):
    """A name goes before a pattern, and that before a class."""
    rng = np.random.default_rng(0)
    names = ("m.0.q", "m.0.k", "m.0.experts.0.up", "m.embed_tokens")
    bits = (8, 4, 2, 8)
    tensors, codes = {}, {}
    for name, width in zip(names, bits, strict=True):
        codes[name] = integers(rng, width, 2, 32)
        tensors |= {
            f"{name}.weight_packed": bit_stream(codes[name], width),
            f"{name}.weight_scale": np.ones((2, 1), ml_dtypes.bfloat16),
            f"{name}.weight_shape": np.array([2, 32]),
        }
    groups = {
        "linear": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": -1}},
        "experts": {"targets": [r"re:.*experts\..*"], "weights": {"num_bits": 2, "strategy": "channel"}},
        "name": {"targets": ["m.0.q", "Embedding"], "weights": {"num_bits": 8, "strategy": "channel"}, "format": "pack-quantized"},
        "activations": {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8}},
    }
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head", "re:.*gate"]}
    source = open_folder(write_folder(tensors, method))
    for name, width in zip(names, bits, strict=True):
        assert source.stored(f"{name}.weight") == f"int{width} per row"
        np.testing.assert_array_equal(source.read(f"{name}.weight"), codes[name] - 2.0 ** (width - 1))


def test_gptqmodels_own_settings_for_a_module(write_folder):
    tensors = {}
    for name, bits in (("a.up", 4), ("a.down", 8)):
        tensors |= {
            f"{name}.qweight": np.zeros((32 * bits // 32, 32), np.int32),
            f"{name}.qzeros": np.zeros((1, bits), np.int32),
            f"{name}.scales": np.ones((1, 32), np.float16),
        }
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"-:.*\.k": {}, r"+:.*\.down": {"bits": 8}}}
    source = open_folder(write_folder(tensors, method))
    assert (source.stored("a.up.weight"), source.stored("a.down.weight")) == ("GPTQ int4 g32", "GPTQ int8 g32")
    np.testing.assert_array_equal(source.read("a.down.weight"), np.full((32, 32), -1, np.float32))


def test_the_settings_that_autogptq_writes_beside_the_config(write_folder):
    tensors = {"x.qweight": np.zeros((4, 8), np.int32), "x.qzeros": np.zeros((1, 1), np.int32), "x.scales": np.ones((1, 8), np.float16)}
    folder = write_folder(tensors)
    with pytest.raises(UserError, match=r"x\.qweight is packed, but config\.json has no quantization_config that says how"):
        open_folder(folder)
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": -1}', encoding="utf-8")
    assert open_folder(folder).stored("x.weight") == "GPTQ int4 g32"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACK = compressed("pack-quantized", num_bits=4, group_size=16)
INT8 = compressed("int-quantized", num_bits=8, strategy="channel")


def zeros(dtype, *shape):
    return np.zeros(shape, KINDS[dtype])


def gptq_pieces(**changes):
    pieces = {"qweight": zeros("I32", 4, 8), "qzeros": zeros("I32", 2, 1), "scales": zeros("F16", 2, 8), **changes}
    return {f"x.{end}": value for end, value in pieces.items() if value is not None}


def awq_pieces(**changes):
    pieces = {"qweight": zeros("I32", 32, 2), "qzeros": zeros("I32", 2, 2), "scales": zeros("F16", 2, 16), **changes}
    return {f"x.{end}": value for end, value in pieces.items() if value is not None}


def pack_pieces(**changes):
    pieces = {"packed": zeros("I32", 8, 4), "scale": zeros("F32", 8, 2), "shape": np.array([8, 32]), **changes}
    return {f"x.weight_{end}": value for end, value in pieces.items() if value is not None}


@pytest.mark.parametrize(
    "method, tensors, message",
    [
        ({"quant_method": "bitsandbytes"}, {}, r"quant_method 'bitsandbytes' of config\.json is not supported: use unquantized weights or"),
        ({"load_in_4bit": True}, {}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "aqlm"}, {}, "quant_method 'aqlm'"),
        ({"quant_method": ["gptq"]}, {}, r"quant_method \['gptq'\]"),
        ({}, {}, "quant_method None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, {}, "GPTQ checkpoint_format 'marlin' is not supported"),
        ({**GPTQ, "bits": 5}, gptq_pieces(), r"bits of quantization_config in config\.json is 5, but 2, 3, 4 or 8 is supported"),
        ({**GPTQ, "bits": "4"}, gptq_pieces(), "is '4', but 2, 3, 4 or 8"),
        ({**GPTQ, "group_size": 0}, gptq_pieces(), "group_size .* is 0, but a positive number or -1"),
        ({**GPTQ, "dynamic": [1]}, gptq_pieces(), r"is not one that gptq writes .*: download config\.json again"),
        ({**GPTQ, "dynamic": {"(": {}}}, gptq_pieces(), r"'\(' in quantization_config .* is no regular expression"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, gptq_pieces(), r"x\.qweight is quantized, but '-:x' of config\.json says that it is not"),
        ({**GPTQ, "desc_act": True}, gptq_pieces(), r"x\.qweight has no x\.g_idx, though config\.json says desc_act"),
        (GPTQ, gptq_pieces(qzeros=None), r"x\.qweight has no x\.qzeros: download all files of the model again"),
        (GPTQ, gptq_pieces(qweight=None), r"x\.(qzeros|scales) is a piece of a gptq weight whose other pieces are missing"),
        (GPTQ, gptq_pieces(weight=zeros("F32", 8, 32)), r"x\.weight is there both as it is and in pieces such as x\.qweight"),
        (GPTQ, gptq_pieces(qweight=zeros("I64", 4, 8)), r"x\.qweight is stored as I64, but I32 is expected"),
        (GPTQ, gptq_pieces(qweight=zeros("I32", 4)), r"x\.qweight has shape \(4,\), but a packed weight has 2 dimensions"),
        (GPTQ, gptq_pieces(scales=zeros("F16", 3, 8)), r"x\.scales has shape \(3, 8\), but \(2, 8\) goes with x\.qweight \(4, 8\)"),
        (GPTQ, gptq_pieces(qzeros=zeros("I32", 2, 2)), r"x\.qzeros has shape \(2, 2\), but \(2, 1\) goes with x\.qweight \(4, 8\)"),
        (GPTQ, gptq_pieces(g_idx=zeros("I32", 33)), r"x\.qweight has shape \(4, 8\), but \(5, 8\) goes with x\.g_idx \(33,\)"),
        (GPTQ, gptq_pieces(g_idx=zeros("I32", 2, 16)), r"x\.g_idx has shape \(2, 16\), but \(32,\) goes with x\.qweight"),
        ({**AWQ, "version": "gemv"}, awq_pieces(), "AWQ version 'gemv' is not supported: use one with version gemm"),
        ({**AWQ, "bits": 8}, awq_pieces(), "bits .* is 8, but 4 is supported"),
        (AWQ, awq_pieces(qzeros=None), r"x\.qweight has no x\.qzeros"),
        (AWQ, awq_pieces(scales=zeros("F16", 2, 8)), r"x\.scales has shape \(2, 8\), but \(2, 16\) goes with x\.qweight \(32, 2\)"),
        (FP8, {"x.weight": zeros("F8_E4M3", 4, 4)}, r"x\.weight is stored as F8_E4M3, but has none of x\.weight_scale_inv, "),
        (
            FP8,
            {"x.weight": zeros("F8_E4M3", 4, 4), "x.weight_scale": zeros("F32", 1), "x.scale": zeros("F32", 1)},
            r"x\.weight has several scales \(x\.weight_scale, x\.scale\)",
        ),
        (
            FP8,
            {"x.weight": zeros("F32", 4, 4), "x.weight_scale_inv": zeros("F32", 1, 1)},
            r"x\.weight_scale_inv is a piece of a fp8 weight",
        ),
        (
            FP8,
            {"x.weight": zeros("F8_E4M3", 300, 130), "x.weight_scale_inv": zeros("F32", 2, 3)},
            r"x\.weight_scale_inv has shape \(2, 3\), but \(3, 2\) or \(300, 1\) or .* goes with x\.weight \(300, 130\)",
        ),
        (FP8, {"x.weight": zeros("F8_E4M3", 4, 4), "x.weight_scale_inv": zeros("I32", 1, 1)}, "is stored as I32, but F32 or F16 or BF16"),
        ({**FP8, "weight_block_size": [128]}, {}, r"weight_block_size .* is \[128\], but two positive numbers are expected"),
        (
            {**PACK, "format": "nvfp4-pack-quantized"},
            {},
            "compressed-tensors format 'nvfp4-pack-quantized' is not supported: use one of pack",
        ),
        ({**PACK, "format": "mixed-precision"}, {}, "compressed-tensors format 'mixed-precision'"),
        ({**PACK, "quantization_status": "frozen"}, {}, "quantization_status is 'frozen', but only 'compressed' is supported"),
        ({**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "with a sparsity_config is not supported"),
        ({**PACK, "transform_config": {"config_groups": {"a": {}}}}, {}, "with a transform_config is not supported"),
        ({**PACK, "ignore": ["re:x"]}, pack_pieces(), r"x is quantized, but config\.json ignores it"),
        ({**PACK, "config_groups": {}}, pack_pieces(), r"x is quantized, but no config group of config\.json targets it"),
        ({**PACK, "config_groups": [1]}, pack_pieces(), "is not one that compressed-tensors writes"),
        (compressed("pack-quantized", num_bits=3, group_size=16), pack_pieces(), "num_bits .* is 3, but 2, 4 or 8 is supported"),
        (compressed("pack-quantized", num_bits=4, type="float"), pack_pieces(), r"x\.weight_packed has codes of type 'float'"),
        (compressed("pack-quantized", num_bits=4, strategy="token"), pack_pieces(), "strategy 'token' for weights is not supported"),
        (compressed("pack-quantized", num_bits=4, strategy="group"), pack_pieces(), "group_size .* is None, but a positive number"),
        (
            compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False),
            pack_pieces(),
            r"asymmetric, but has no x\.weight_zero_p",
        ),
        (PACK, pack_pieces(shape=None), r"x\.weight_packed has no x\.weight_shape"),
        (PACK, pack_pieces(shape=np.array([8, 32, 1])), r"x\.weight_shape has shape \(3,\), but \(2,\) goes with x\.weight_packed"),
        (PACK, pack_pieces(shape=np.array([8, 40])), r"has shape \(8, 4\), but x\.weight_shape says that \(8, 40\) .* needs \(8, 5\)"),
        (
            PACK,
            pack_pieces(scale=zeros("F32", 8, 3)),
            r"x\.weight_scale has shape \(8, 3\), but \(8, 2\) goes with x\.weight_packed \(8, 4\)",
        ),
        (
            PACK,
            pack_pieces(zero_point=zeros("I32", 8, 2)),
            r"x\.weight_zero_point has shape \(8, 2\), but \(1, 2\) goes with x\.weight_scale",
        ),
        (PACK, pack_pieces(g_idx=zeros("I32", 31)), r"x\.weight_g_idx has shape \(31,\), but \(32,\) goes with x\.weight_packed"),
        (PACK, pack_pieces(packed=None, scale=None), r"x\.weight_shape is a piece of a compressed-tensors weight whose other pieces"),
        (INT8, {"x.weight_scale": zeros("F32", 4, 1)}, r"x\.weight_scale has no x\.weight"),
        (INT8, {"x.weight_scale": zeros("F32", 4, 1), "x.weight": zeros("F32", 4, 4)}, r"x\.weight is stored as F32, but I8 or"),
        (
            INT8,
            {"x.weight_scale": zeros("F32", 4, 1), "x.weight": zeros("I8", 4)},
            r"x\.weight has shape \(4,\), but a quantized weight has 2",
        ),
        (
            INT8,
            {"x.weight_scale": zeros("F32", 5, 1), "x.weight": zeros("I8", 4, 4)},
            r"\(5, 1\), but \(4, 1\) or \(4,\) goes with x\.weight",
        ),
        ({"quant_method": "mxfp4"}, {"x_blocks": zeros("U8", 2, 3, 1, 16)}, "x_blocks has no x_scales"),
        ({"quant_method": "mxfp4"}, {"x_scales": zeros("U8", 2, 3, 1)}, "x_scales is a piece of a mxfp4 weight whose other pieces"),
        (
            {"quant_method": "mxfp4"},
            {"x_blocks": zeros("U8", 2, 3, 1, 8), "x_scales": zeros("U8", 2, 3, 1)},
            r"x_blocks has shape \(2, 3, 1, 8\), but \(experts, out, in / 32, 16\) is expected",
        ),
        (
            {"quant_method": "mxfp4"},
            {"x_blocks": zeros("U8", 2, 3, 1, 16), "x_scales": zeros("U8", 2, 3)},
            r"x_scales has shape \(2, 3\), but \(2, 3, 1\) goes with x_blocks \(2, 3, 1, 16\)",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(write_folder, method, tensors, message):
    with pytest.raises(UserError, match=message) as error:
        open_folder(write_folder({"y": np.ones(1, np.float32), **tensors}, method))
    assert "\n" not in str(error.value)


def test_groups_that_are_not_there_are_refused(write_folder):
    source = open_folder(write_folder(gptq_pieces(g_idx=np.full(32, 2, np.int32)), GPTQ))
    with pytest.raises(UserError, match=r"x\.g_idx names groups 2 to 2, but there are 2: the files are damaged"):
        source.read("x.weight")


def damaged(value):
    """`value` with each of its parts replaced by what does not belong there."""
    yield from (None, 0, -1, 1.5, True, 2**70, "x", "re:(", [], [1], {}, {"a": 1}, [{"a": [None]}])
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in damaged(inner))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in damaged(inner))


@pytest.mark.parametrize(
    "method, tensors",
    [
        ({**GPTQ, "desc_act": False, "checkpoint_format": "gptq", "dynamic": {"x": {"bits": 4}}}, gptq_pieces()),
        ({**AWQ, "version": "gemm"}, awq_pieces()),
        (FP8, {"x.weight": zeros("F8_E4M3", 4, 4), "x.weight_scale_inv": zeros("F32", 1, 1)}),
        ({**PACK, "ignore": ["lm_head"], "quantization_status": "compressed", "sparsity_config": {"format": "dense"}}, pack_pieces()),
        ({"quant_method": "mxfp4"}, {"x_blocks": zeros("U8", 2, 3, 1, 16), "x_scales": zeros("U8", 2, 3, 1)}),
    ],
    ids=["gptq", "awq", "fp8", "compressed-tensors", "mxfp4"],
)
def test_any_damaged_setting_opens_or_is_refused(write_folder, method, tensors):
    """Never another exception than UserError."""
    folder = write_folder(tensors, method)
    assert len(open_folder(folder).names()) == 1
    for wrong in damaged(method):
        (folder / "config.json").write_text(json.dumps({"quantization_config": wrong}), encoding="utf-8")
        try:
            source = open_folder(folder)
            for name in source.names():
                source.read(name)
        except UserError as error:
            assert "\n" not in str(error)


NOT_HELD = {  # groups that don't divide the inputs, or inputs that don't fill bytes: these are read as floats
    "pack int4 channel, ragged", "float8 block, ragged", "fp8 square blocks", "fp8 ragged columns", "fp8 power-of-two scales",
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_a_packed_weight_keeps_its_codes(write_folder, case):
    """As `QuantArray`s they stand for the same numbers, take no more room than the codes and scales do, and can be cut."""
    source = open_folder(write_folder(golden_tensors(case), case["quantization_config"]))
    name = case["weight"]
    packing, want = source.packing(name), source.read(name)
    want = want.swapaxes(1, 2) if source.weights[name].turned else want
    if packing is None:
        assert case["name"] in NOT_HELD
        return
    assert case["name"] not in NOT_HELD
    got = source.packed(name)
    np.testing.assert_allclose(got.widen(), want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(source.packed(name, (slice(1, 2),)).widen(), want[1:2], rtol=1e-6, atol=1e-7)
    unit = packing.unit
    if want.shape[-1] > unit and got.order is None:
        np.testing.assert_allclose(source.packed(name, (*(slice(0, n) for n in want.shape[:-1]), slice(0, unit))).widen(), want[..., :unit])
        with pytest.raises(UserError, match="use a smaller mesh, or --weights=bf16"):
            source.packed(name, (*(slice(0, n) for n in want.shape[:-1]), slice(0, 1)))
