"""Which tensors of a Hugging Face folder are the pieces of one packed weight, by `quant_method` of its config.json.

Each method finds its weights among the tensors' names, checks dtypes and shapes against one another before anything is read, and says how
a weight's rows are read. All other tensors are themselves.
"""

from collections.abc import Callable

import numpy as np

from checkpoint.compressed_tensors import find_compressed
from checkpoint.float_blocks import FLOAT8, find_float8, find_mxfp4, float8_scales
from checkpoint.gptq_awq import find_awq, find_gptq
from checkpoint.pieces import Entries, Found, Raw, Refused, Settings, Stored, Weight

# How each method's weights are found, and how names end that only pieces have.
METHODS: dict[str, tuple[Callable[[Entries, Settings, Raw], Found], tuple[str, ...]]] = {
    "fp8": (find_float8, ("_scale_inv", ".weight_scale", ".qscale_weight")),
    "gptq": (find_gptq, (".qweight", ".qzeros", ".scales", ".g_idx")),
    "awq": (find_awq, (".qweight", ".qzeros", ".scales")),
    "compressed-tensors": (
        find_compressed,
        (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    ),
    "mxfp4": (find_mxfp4, ("_blocks", "_scales")),
}
SUPPORTED = "unquantized weights or quant_method fp8, gptq, awq, compressed-tensors or mxfp4"


def weights(entries: Entries, settings: Settings | None, raw: Raw) -> Found:
    """The logical tensors by name; every stored tensor is a piece of exactly one.

    Args:
        entries: the stored tensors.
        settings: `quantization_config` of config.json, None if it has none.
        raw: reads a stored tensor; used here for the two numbers of `weight_shape` only.

    Raises:
        Refused: an unsupported method or variant of one, missing pieces, dtypes or shapes that don't go together.
    """
    method = _method(entries, settings)
    if method is None:
        return {name: _plain(name, entry) for name, entry in entries.items()}
    find, suffixes = METHODS[method]
    try:
        found = find(entries, settings or {}, raw)
    except (AttributeError, KeyError, TypeError) as error:  # a list where an object belongs, and the like
        raise Refused(
            f"quantization_config of config.json is not one that {method} writes ({error}): download config.json again"
        ) from error
    owner: dict[str, str] = {}
    for name, weight in found.items():
        for piece in weight.pieces:
            if piece in owner:
                raise Refused(f"{piece} is a piece of both {owner[piece]} and {name}: the files are mixed up; download them again")
            owner[piece] = name
    for name in entries.keys() - owner.keys():
        if name.endswith(suffixes):
            raise Refused(f"{name} is a piece of a {method} weight whose other pieces are missing: download all files of the model again")
        if name in found:
            raise Refused(f"{name} is there both as it is and in pieces such as {found[name].pieces[0]}: keep one of the two")
        found[name] = _plain(name, entries[name])
    return found


def _method(entries: Entries, settings: Settings | None) -> str | None:
    if settings is not None:
        bits_and_bytes = "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else None
        method = settings.get("quant_method", bits_and_bytes)
        if not isinstance(method, str) or method not in METHODS:
            raise Refused(f"quant_method {method!r} of config.json is not supported: use {SUPPORTED}")
        return method
    for name in entries:
        if name.endswith((".qweight", ".weight_packed")):
            raise Refused(
                f"{name} is packed, but config.json has no quantization_config that says how: take config.json from the same model"
            )
    if any(name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in entries for name in entries):
        return "mxfp4"
    if any(entry.dtype in FLOAT8 and float8_scales(entries, name) for name, entry in entries.items()):
        return "fp8"
    return None


def _plain(name: str, entry: Stored) -> Weight:
    def rows(raw: Raw, start: int, stop: int) -> np.ndarray:
        values = raw(name)
        values = values[start:stop] if values.ndim else values
        return values.astype(np.float32) if entry.dtype == "F64" or entry.dtype.startswith("F8") else values

    return Weight(entry.shape, entry.dtype, (name,), rows)
