"""Model folders as Hugging Face holds them, written here."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

WORDS = {
    np.dtype(kind): word
    for word, kind in {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I64": np.int64, "I32": np.int32, "I8": np.int8,
        "U8": np.uint8, "BOOL": np.bool_,
    }.items()
}  # fmt: skip


def safetensors(tensors, header=None):
    """The bytes of a file: header length, header, data one after the other. `header` changes the header before it is written."""
    described, data = {}, b""
    for name, value in tensors.items():
        start, data = len(data), data + value.tobytes()
        described[name] = {"dtype": WORDS[value.dtype], "shape": list(value.shape), "data_offsets": [start, len(data)]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **described} if header is None else header(described)).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def write_folder(tmp_path):
    """`write(shards, quantization=None, index=True, **config)` -> path; `shards` is {file: {tensor: array}}, or only the latter."""

    def write(shards, quantization=None, index=True, **config):
        if not all(isinstance(value, dict) for value in shards.values()):
            shards = {"model.safetensors": shards}
        if quantization is not None:
            config["quantization_config"] = quantization
        tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": "toy", **config}), encoding="utf-8")
        for shard, tensors in shards.items():
            tmp_path.joinpath(shard).write_bytes(safetensors(tensors))
        if index and len(shards) > 1:
            table = {name: shard for shard, tensors in shards.items() for name in tensors}
            text = json.dumps({"metadata": {}, "weight_map": table})
            tmp_path.joinpath("model.safetensors.index.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def safetensors_bytes():
    """The function that writes a file's bytes, for files that are damaged on purpose."""
    return safetensors
