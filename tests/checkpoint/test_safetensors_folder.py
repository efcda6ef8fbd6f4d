"""Hugging Face folders: read right, or refused with a reason."""

import gc
import json
import os
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoint import open_folder
from runtime import UserError

RNG = np.random.default_rng(0)
TENSORS = {
    "odd": np.arange(3, dtype=np.uint8),  # what follows stands at an odd place
    "f32": RNG.standard_normal((4, 6), dtype=np.float32),
    "f16": RNG.standard_normal((4, 6)).astype(np.float16),
    "bf16": RNG.standard_normal((2, 3, 4)).astype(ml_dtypes.bfloat16),
    "f64": RNG.standard_normal((3,)),
    "i64": np.array([[-(2**40), 2**40]]),
    "bool": np.array([True, False]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "f8": RNG.standard_normal((2, 2)).astype(ml_dtypes.float8_e4m3fn),
}


def test_tensors_come_back_as_they_are_stored(write_folder):
    """float64 and float8 as float32."""
    folder = write_folder(TENSORS, architectures=["Toy"])
    source = open_folder(folder)
    assert source.path == folder and source.config == {"model_type": "toy", "architectures": ["Toy"]}
    assert source.names() == set(TENSORS)
    for name, value in TENSORS.items():
        got = source.read(name)
        assert type(got) is np.ndarray and got.flags.aligned and got.flags.c_contiguous
        assert source.shape(name) == got.shape == value.shape
        want = value.astype(np.float32) if name in ("f64", "f8") else value
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        if value.ndim:
            np.testing.assert_array_equal(source.read_rows(name, 0, min(1, len(value))), want[:1])
    assert [source.stored(name) for name in ("f32", "bf16", "f8", "bool")] == ["F32", "BF16", "F8_E4M3", "BOOL"]


def test_files_of_the_safetensors_package_are_read(tmp_path, write_folder):
    """And the package reads what the tests of this folder write."""
    folder = write_folder({name: value for name, value in TENSORS.items() if name not in ("bf16", "f8")})
    by_package = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(by_package, folder / "model.safetensors", metadata={"format": "np"})
    source = open_folder(folder)
    assert source.names() == set(by_package)
    for name, value in by_package.items():
        np.testing.assert_array_equal(source.read(name), value.astype(np.float32) if name == "f64" else value)


def test_shards_are_read_as_one(write_folder):
    source = open_folder(
        write_folder({"model-00001-of-00002.safetensors": {"a": TENSORS["f32"]}, "model-00002-of-00002.safetensors": {"b": TENSORS["f16"]}})
    )
    assert source.names() == {"a", "b"}
    np.testing.assert_array_equal(source.read("b"), TENSORS["f16"])


def test_without_an_index_all_files_are_read_or_the_one_of_the_usual_name(write_folder):
    source = open_folder(write_folder({"x.safetensors": {"a": TENSORS["f32"]}, "y.safetensors": {"b": TENSORS["f16"]}}, index=False))
    assert source.names() == {"a", "b"}
    source = open_folder(write_folder({"model.safetensors": {"c": TENSORS["f32"]}}))
    assert source.names() == {"c"}


def test_symbolic_links_are_followed_as_the_hub_cache_needs(write_folder, tmp_path):
    folder = write_folder({"a": TENSORS["f32"]})
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(folder / name)
    np.testing.assert_array_equal(open_folder(snapshot).read("a"), TENSORS["f32"])


def test_a_view_is_read_only_and_its_pages_go_with_it(write_folder):
    folder = write_folder({"a": np.ones((1024, 1024), np.float32)})
    source = open_folder(folder)
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists a process's mappings")
    shard = os.fspath(folder / "model.safetensors")
    assert shard not in maps.read_text()
    rows = source.read_rows("a", 10, 12)
    assert shard in maps.read_text()
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 0
    del rows
    gc.collect()
    assert shard not in maps.read_text()


def test_a_missing_tensor_and_missing_rows_are_named(write_folder):
    source = open_folder(write_folder({"a": TENSORS["f32"]}))
    for ask in (source.shape, source.stored, source.read, lambda name: source.read_rows(name, 0, 1)):
        with pytest.raises(UserError, match=r"has no tensor 'output' among its 1"):
            ask("output")
    for start, stop in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(UserError, match=rf"rows {start} to {stop} of 'a' were asked for, but it has 4"):
            source.read_rows("a", start, stop)


def test_a_file_that_went_away_is_named(write_folder):
    folder = write_folder({"a": TENSORS["f32"]})
    source = open_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors could be opened, but can't be read any more: No such file"):
        source.read("a")


def test_a_folder_is_needed_with_a_config(tmp_path):
    with pytest.raises(UserError, match="none does not exist: check the path"):
        open_folder(tmp_path / "none")
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="is a file, but a model's folder"):
        open_folder(file)
    with pytest.raises(
        UserError, match=r"holds no config\.json: it is no Hugging Face model folder, or not all of one; download all files$"
    ):
        open_folder(tmp_path)
    (tmp_path / "snapshots").mkdir()
    with pytest.raises(UserError, match="give one of the folders in its snapshots/"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"config\.json is no JSON .*; it is empty: download it again"),
        (b"{", r"config\.json is no JSON"),
        (b"<html>", "it looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it looks like a Git LFS pointer"),
        (b"\xff\xfe{", r"config\.json is no JSON"),
        (b"[" * 100_000, r"config\.json is no JSON"),
        (b"[1]", r"config\.json holds no JSON object, but list"),
        (b'{"quantization_config": "gptq"}', r"config\.json: its quantization_config is 'gptq', but should be an object"),
    ],
)
def test_a_broken_config_is_refused(write_folder, content, message):
    folder = write_folder({"a": TENSORS["f32"]})
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_the_quantization_of_a_text_model_in_a_larger_one_is_found(write_folder):
    with pytest.raises(UserError, match="quant_method 'bitsandbytes'"):
        open_folder(write_folder({"a": TENSORS["f32"]}, text_config={"quantization_config": {"quant_method": "bitsandbytes"}}))


@pytest.mark.parametrize(
    "files, message",
    [
        ([], r"holds no \*\.safetensors, only config\.json: download the model's weights"),
        (["pytorch_model.bin"], r"only pytorch_model\.bin: convert them to safetensors"),
        (["a.pth", "b.pth", "c.pth", "d.pth", "e.pth"], r"only a\.pth, b\.pth, c\.pth and 2 more: convert them"),
        (["model.gguf"], r"only model\.gguf: give the path of the \.gguf file itself"),
        (["flax_model.msgpack"], r"only flax_model\.msgpack: download the model's \*\.safetensors as well"),
    ],
)
def test_a_folder_without_safetensors_says_what_is_there(tmp_path, files, message):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        open_folder(tmp_path)


def test_missing_shards_are_listed(write_folder):
    shards = {f"model-{number:05d}-of-00003.safetensors": {f"t{number}": TENSORS["f32"]} for number in (1, 2, 3)}
    folder = write_folder(shards)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of 3 files that its model\.safetensors\.index\.json promise .*: download model-00002-of-00003"):
        open_folder(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"1 of 3 files that its file names promise are missing: download model-00002-of-00003"):
        open_folder(folder)


@pytest.mark.parametrize(
    "index, message",
    [
        ("{}", "has no weight_map from tensors to files"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', r"names '\.\./model\.safetensors', which is no file of the folder"),
        ('{"weight_map": {"a": "model.safetensors", "z": "model.safetensors"}}', "promises tensor 'z' in model.safetensors, which is not"),
        ('{"weight_map"', r"index\.json is no JSON"),
    ],
)
def test_a_broken_index_is_refused(write_folder, index, message):
    folder = write_folder({"a": TENSORS["f32"]})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_a_tensor_in_two_shards_is_refused(write_folder):
    shard = {"a": TENSORS["f32"]}
    with pytest.raises(UserError, match=r"tensor 'a' is in both x\.safetensors and y\.safetensors"):
        open_folder(write_folder({"x.safetensors": shard, "y.safetensors": shard}, index=False))


def test_a_shard_cut_anywhere_is_refused(write_folder):
    folder = write_folder({name: TENSORS[name] for name in ("odd", "f32", "bf16")})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(9, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.safetensors is incomplete: .*: download it again"):
            open_folder(folder)
    for length in range(9):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.safetensors is (empty|no safetensors file)"):
            open_folder(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match=r"is damaged: it has \d+ bytes, but its tensors end at"):
        open_folder(folder)


def test_a_shard_with_any_damaged_header_byte_opens_or_is_refused(write_folder):
    """Never another exception than UserError, whatever lengths, offsets and names become."""
    folder = write_folder({name: TENSORS[name] for name in ("odd", "f32")})
    path = folder / "model.safetensors"
    whole = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    refused = 0
    for position in range(end):
        for value in (0xFF, whole[position] ^ 0x01, ord("9"), ord("[")):
            copy = whole.copy()
            copy[position] = value
            path.write_bytes(copy)
            try:
                source = open_folder(folder)
                for name in source.names():
                    source.read(name)
            except UserError:
                refused += 1
    assert refused > end


def described(**changes):
    """A header with tensor `a` of two float32, changed."""
    return lambda _: {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, **changes}


PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, message",
    [
        (described(a={"dtype": "F32", "shape": [2]}), "describes tensor 'a' without dtype, shape and two data_offsets"),
        (described(a=[]), "describes tensor 'a' without"),
        (described(a={**PAIR, "data_offsets": [0]}), "describes tensor 'a' without"),
        (described(a={**PAIR, "shape": [-2]}), r"tensor 'a' has shape \[-2\] and data_offsets \[0, 8\]"),
        (described(a={**PAIR, "shape": [2.0]}), r"tensor 'a' has shape \[2\.0\]"),
        (described(a={**PAIR, "shape": 2}), "tensor 'a' has shape 2"),
        (described(a={**PAIR, "data_offsets": [True, 8]}), r"and data_offsets \[True, 8\]"),
        (described(a={**PAIR, "shape": [3]}), r"tensor 'a', F32 \(3,\), needs 12 bytes, but data_offsets \[0, 8\] are 8"),
        (
            described(a={**PAIR, "dtype": "F4"}),
            "holds tensor 'a' of dtype 'F4', which is not supported: use a conversion to one of F64, F32",
        ),
        (described(a={**PAIR, "dtype": ["F32"]}), r"of dtype \['F32'\], which is not supported"),
        (described(b={**PAIR, "data_offsets": [4, 12]}), "is damaged: the tensor at byte .* overlaps the one before"),
        (described(b={**PAIR, "data_offsets": [12, 20]}), "is damaged: the tensor at byte .* leaves a gap after the one before"),
        (described(b={**PAIR, "data_offsets": [8, 16]}), "is incomplete: it has .* bytes, of which its tensors need"),
        (lambda _: [], "is no safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(write_folder, safetensors_bytes, header, message):
    folder = write_folder({"a": TENSORS["f32"]})
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"a": np.ones(2, np.float32)}, header))
    with pytest.raises(UserError, match=message) as error:
        open_folder(folder)
    assert "\n" not in str(error.value) and "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer, .*: run `git lfs pull` in"),
        (b"GGUF" + bytes(60), "it looks like a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "it looks like a zip archive"),
        (struct.pack("<Q", 2**60) + b"{}", "its header is said to have 1152921504606846976 bytes"),
        (struct.pack("<Q", 4000) + b"{}", "is incomplete: it has 10 bytes, of which its header alone needs 4008"),
        (struct.pack("<Q", 2) + b"{]", r"is damaged: its header is no JSON"),
        (struct.pack("<Q", 20) + b'{"a": {}, "a": {}}  ', "is damaged: it has 'a' twice"),
        (struct.pack("<Q", 100_000) + b'{"a":' + b"[" * 99_995, "is damaged: its header is no JSON"),
    ],
)
def test_other_files_are_refused_with_what_they_look_like(write_folder, content, message):
    folder = write_folder({"a": TENSORS["f32"]})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_called_that(write_folder, monkeypatch, name):
    folder = write_folder({"a": TENSORS["f32"]})
    real = pathlib.Path.open

    def denied(path, *args, **kwargs):  # as root, which tests may run as, no permission is ever denied
        if path.name == name:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", denied)
    with pytest.raises(UserError, match=rf"{name} can't be read: Permission denied; check its permissions"):
        open_folder(folder)


def test_json_numbers_that_are_no_numbers_do_no_harm(write_folder):
    folder = write_folder({"a": TENSORS["f32"]})
    (folder / "config.json").write_text(json.dumps({"eps": float("nan")}), encoding="utf-8")
    assert open_folder(folder).names() == {"a"}
