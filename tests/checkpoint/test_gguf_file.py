"""GGUF files: read right, or refused with a reason."""

import mmap
import shutil
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
    base = raw
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)
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
    for name in file.tensors:
        np.testing.assert_array_equal(open_gguf(cut).raw(name), file.raw(name))


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


def write_split(folder, name="model", count=3, **options):
    """`count` parts as the gguf package splits a model, two tensors each."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "toy", split_max_tensors=2, **options)
    writer.add_string("text", name)
    weights = {f"t{number}": rng.standard_normal((2, 32), dtype=np.float32) for number in range(2 * count)}
    for key, value in weights.items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [folder / f"{name}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)], weights


def test_any_part_of_a_split_model_opens_all(tmp_path):
    parts, weights = write_split(tmp_path)
    for part in parts:
        file = open_gguf(part)
        assert file.path == part and file.metadata["text"] == "model" and file.tensors.keys() == weights.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(file.dequantize(name), weight)


def test_the_first_part_may_hold_metadata_only(tmp_path):
    _, weights = write_split(tmp_path, count=2, small_first_shard=True)
    file = open_gguf(tmp_path / "model-00001-of-00003.gguf")
    assert file.metadata["text"] == "model" and file.tensors.keys() == weights.keys()


def test_a_split_of_one_part_is_a_whole_file(tmp_path):
    metadata = {"split.no": 0, "split.count": 1, "split.tensors.count": 5}
    assert len(open_gguf(write_gguf(tmp_path / "whole.gguf", metadata=metadata)).tensors) == 5


def test_missing_parts_of_a_split_model_are_listed(tmp_path):
    parts, _ = write_split(tmp_path, count=7)
    for part in parts[1:6]:
        part.unlink()
    with pytest.raises(UserError, match=r"is one of 7 parts, of which 5 are not beside it: download model-00002-.* and 2 more into"):
        open_gguf(parts[6])


def test_a_damaged_part_of_a_split_model_is_named(tmp_path):
    parts, _ = write_split(tmp_path)
    parts[1].write_bytes(parts[1].read_bytes()[:-64])
    with pytest.raises(UserError, match=r"model-00002-of-00003\.gguf \(\d+ bytes\) is incomplete"):
        open_gguf(parts[0])


def test_mixed_up_parts_of_split_models_are_refused(tmp_path):
    parts, _ = write_split(tmp_path)
    (tmp_path / "other").mkdir()
    others, _ = write_split(tmp_path / "other", count=4)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(UserError, match=r"00002.* says that it is part 3 of 3 .* should be part 2 of 3 of 6: it belongs to another model"):
        open_gguf(parts[0])
    shutil.copy(others[1], parts[1])
    with pytest.raises(UserError, match=r"says that it is part 2 of 4 of a model of 8 tensors, but .* it should be part 2 of 3 of 6"):
        open_gguf(parts[0])


@pytest.mark.parametrize(
    "keys, held, message",
    [
        ({}, ("a", "b"), None),
        ({"split.tensors.count": 3}, ("a", "b"), "all 2 parts hold 2 tensors, but they promise 3: download it again"),
        ({}, ("a", "a"), "holds tensor 'a', which another part holds as well"),
    ],
)
def test_the_tensors_of_all_parts_are_counted(tmp_path, keys, held, message):
    paths = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, (path, name) in enumerate(zip(paths, held, strict=True)):
        metadata = {"split.no": number, "split.count": 2, "split.tensors.count": 2} | keys
        write_gguf(path, metadata=metadata, tensors={name: (WEIGHT, TYPES.F32)})
    if message is None:
        assert open_gguf(paths[0]).tensors.keys() == {"a", "b"}
    else:
        with pytest.raises(UserError, match=message):
            open_gguf(paths[0])


@pytest.mark.parametrize("name", ["renamed.gguf", "m-00002-of-00003.gguf", "m-00001-of-00002.gguf"])
def test_a_renamed_part_of_a_split_model_gets_its_name_back(tmp_path, name):
    metadata = {"split.no": 0, "split.count": 3, "split.tensors.count": 5}
    with pytest.raises(UserError, match=r"is part 1 of a model of 3 parts, which its name .* rename it to \w+-00001-of-00003\.gguf"):
        open_gguf(write_gguf(tmp_path / name, metadata=metadata))


def test_a_split_count_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "t.gguf"
    text = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IQ", 8, 3) + b"two"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    with pytest.raises(UserError, match=r"is damaged: its split\.count is 'two'"):
        open_gguf(path)


def test_a_file_that_went_away_is_named(tmp_path):
    path = write_gguf(tmp_path / "t.gguf")
    file = open_gguf(path)
    path.unlink()
    with pytest.raises(UserError, match="could be opened, but can't be read any more: No such file or directory; put it back"):
        file.dequantize("F32")


BLOCK_TYPES = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]


def finite_blocks(kind, rows, blocks):
    """uint8 [rows, blocks * bytes per block]: random blocks, of which those are taken whose values are finite and below 1e6."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind)).integers(0, 256, (64 * rows * blocks, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(random, kind)
    good = random[(np.abs(values) < 1e6).all(axis=1)]  # a comparison with nan is false
    assert len(good) >= rows * blocks
    return good[: rows * blocks].reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_block_format_of_the_gguf_package_loads(tmp_path, kind):
    packed = finite_blocks(kind, rows=3, blocks=2)
    values = open_gguf(write_gguf(tmp_path / "t.gguf", tensors={"w": (packed, kind)})).dequantize("w")
    assert values.shape == (3, 2 * gguf.GGML_QUANT_SIZES[kind][0]) and values.dtype == np.float32
    assert np.isfinite(values).all() and values.any()
    np.testing.assert_array_equal(values, gguf.quants.dequantize(packed, kind))


def test_an_mxfp4_block_has_the_values_of_the_standard(tmp_path):
    """OCP microscaling formats 1.0: E2M1 values times 2^(scale - 127). A GGUF block's low nibbles are its first 16 values."""
    codes = np.arange(16, dtype=np.uint8)
    packed = np.concatenate([[128], codes | codes[::-1] << 4]).astype(np.uint8)[None]
    values = open_gguf(write_gguf(tmp_path / "t.gguf", tensors={"w": (packed, TYPES.MXFP4)})).dequantize("w")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = 2 * np.concatenate([table, -table])
    np.testing.assert_array_equal(values, [np.concatenate([table, table[::-1]])])


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
