"""GGUF files: read right, or refused with a reason."""

import struct
import time

import gguf
import numpy as np
import pytest

from checkpoint import open_gguf
from runtime import UserError

TYPES = gguf.GGMLQuantizationType
WEIGHT = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
TOKENS = ["a", "", "日本", "🙂" * 3, " " * 100]


def write_gguf(path, *, endianess=gguf.GGUFEndian.LITTLE, metadata=None, tensors=None):
    """A small file with metadata of every type and, unless told otherwise, the same weight in five formats."""
    writer = gguf.GGUFWriter(path, "toy", endianess=endianess)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -7)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("tokens", TOKENS)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("flags", [True, False])
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    if tensors is None:
        tensors = {
            kind.name: (gguf.quants.quantize(WEIGHT, kind), kind) for kind in (TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_1)
        }
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_of_every_type_is_a_plain_value(small):
    assert open_gguf(small).metadata == {
        "general.architecture": "toy",
        "u8": 200,
        "i8": -3,
        "u16": 60_000,
        "i16": -30_000,
        "u32": 4_000_000_000,
        "i32": -7,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "grüße",
        "tokens": TOKENS,
        "numbers": [1, 2, 3],
        "scores": [0.5, -1.5],
        "flags": [True, False],
    }


@pytest.mark.parametrize("name, tolerance", [("F32", 0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.25)])
def test_a_tensor_comes_back_in_float32_and_row_major(small, name, tolerance):
    file = open_gguf(small)
    values = file.dequantize(name)
    assert values.dtype == np.float32 and type(values) is np.ndarray
    assert file.tensors[name].shape == values.shape == (4, 64)
    np.testing.assert_allclose(values, WEIGHT, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(values, gguf.quants.dequantize(gguf.quants.quantize(WEIGHT, TYPES[name]), TYPES[name]))


def test_raw_bytes_are_a_view_of_the_file(small):
    file = open_gguf(small)
    raw = file.raw("Q8_0")
    assert raw.shape == (4, 2 * 34) and raw.dtype == np.uint8
    assert np.shares_memory(raw, file.data)
    with pytest.raises(ValueError, match="read-only"):
        raw[0, 0] = 0


def test_three_dimensions_keep_their_order(tmp_path):
    values = np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32)
    file = open_gguf(write_gguf(tmp_path / "t.gguf", tensors={"experts": (values, TYPES.F32)}))
    np.testing.assert_array_equal(file.dequantize("experts"), values)


def test_a_missing_tensor_and_a_missing_key_are_named(small):
    file = open_gguf(small)
    assert file.require("i32") == -7
    with pytest.raises(UserError, match=r"has no metadata 'toy\.block_count'"):
        file.require("toy.block_count")
    for ask in (file.tensor, file.raw, file.dequantize):
        with pytest.raises(UserError, match=r"has no tensor 'output\.weight' among its 5"):
            ask("output.weight")


def test_a_format_without_dequantizer_is_named(tmp_path):
    file = open_gguf(write_gguf(tmp_path / "t.gguf", tensors={"ids": (np.arange(32, dtype=np.int32), TYPES.I32)}))
    with pytest.raises(UserError, match="tensor 'ids' is stored as I32, which can't be converted"):
        file.dequantize("ids")


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    """Every byte of the header, and a stride of the tensor data; the last tensor's padding may be missing."""
    whole = small.read_bytes()
    file = open_gguf(small)
    end = max(info.offset + info.num_bytes for info in file.tensors.values())
    start = min(info.offset for info in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, start), *range(start, end, 97), end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.gguf \(\d+ bytes\) is incomplete: .*: download it again"):
            open_gguf(cut)
    cut.write_bytes(whole[:end])
    assert open_gguf(cut).tensors == file.tensors


def test_a_file_with_any_damaged_header_byte_opens_or_is_refused(small, tmp_path):
    """Never another exception than UserError, and no huge allocation, whatever the length fields say."""
    whole = bytearray(small.read_bytes())
    start = min(info.offset for info in open_gguf(small).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for position in range(start):
        for value in (0xFF, whole[position] ^ 0x01):
            copy = whole.copy()
            copy[position] = value
            damaged.write_bytes(copy)
            try:
                file = open_gguf(damaged)
            except UserError:
                refused += 1
            else:
                assert all(info.offset + info.num_bytes <= len(whole) for info in file.tensors.values())
    assert refused > start // 2


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"Hello, this is my diary.\nDay 1", "looks like a text file that starts with 'Hello, this is my diary.'"),
        ("日本語のテキスト".encode() * 9, "looks like a text file that starts with '日本"),
        (b"<!DOCTYPE html><html>", "looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "looks like a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "looks like a zip archive"),
        (struct.pack("<Q", 1000) + b'{"__metadata__":{}}', "looks like a safetensors file"),
        (b"tjgg" + bytes(60), "looks like a GGML file from before GGUF"),
        (b"\x80\x02}q\x00", "looks like other data, starting with bytes 80 02 7d 71 00"),
        (b"\n", "looks like other data, starting with bytes 0a"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(16), r"has GGUF version 9; versions \(2, 3\) are supported"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "has GGUF version 1"),
        (b"GGUF" + struct.pack("<I", 0) + bytes(16), "has GGUF version 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "is incomplete"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "is incomplete"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "is incomplete: its header promises"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), "is incomplete"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "metadata of type 9 is unknown"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "metadata of type 77 is unknown"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 0), "is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"k", 0, 5), "has metadata 'k' twice"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9) + bytes(99), "tensor 't' has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 4, 0) + bytes(99), "tensor 't' in format 4"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0) + bytes(99), "no multiple of the 32 of a block"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0) + bytes(99), r"has shape \(0,\)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 0) + bytes(99), "has tensor 't' twice"),
    ],
)
def test_other_files_are_refused_with_what_they_look_like(tmp_path, content, message):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_gguf(path)


def test_a_big_endian_file_is_called_that(tmp_path):
    with pytest.raises(UserError, match=r"is a big-endian GGUF file: .*gguf-convert-endian"):
        open_gguf(write_gguf(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG))


def test_a_part_of_a_split_model_is_called_that(tmp_path):
    with pytest.raises(UserError, match=r"is one of 3 parts of a split model: .*--merge"):
        open_gguf(write_gguf(tmp_path / "part.gguf", metadata={"split.count": 3}))


def test_an_impossible_alignment_is_refused(tmp_path):
    with pytest.raises(UserError, match="its alignment is 0"):
        open_gguf(write_gguf(tmp_path / "t.gguf", metadata={"general.alignment": 0}))


def test_a_missing_file_and_a_folder_are_called_that(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="is a folder"):
        open_gguf(tmp_path)


def test_a_file_that_may_not_be_read_is_called_that(small, monkeypatch):
    def denied(*args, **kwargs):  # as root, which tests may run as, no permission is ever denied
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", denied)
    with pytest.raises(UserError, match="can't be read: Permission denied; check its permissions"):
        open_gguf(small)


def test_the_default_model_reads_as_the_gguf_package_reads_it(smollm2_path):
    file = open_gguf(smollm2_path)
    reference = gguf.GGUFReader(smollm2_path)
    fields = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == fields
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        assert file.tensors[tensor.name].type == tensor.tensor_type
        np.testing.assert_array_equal(file.raw(tensor.name).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_the_default_model_opens_in_a_second(smollm2_path):
    open_gguf(smollm2_path)
    start = time.perf_counter()
    open_gguf(smollm2_path)
    assert time.perf_counter() - start < 1.0
