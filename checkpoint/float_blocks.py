"""Float codes: fp8 (DeepSeek, transformers' FineGrainedFP8Config), DeepSeek V4's float4 experts, and gpt-oss's MXFP4."""

import math

import numpy as np

from checkpoint import packed, pieces
from checkpoint.pieces import POWERS, SCALES, Coded, Entries, Found, Raw, Refused, Settings, Weight, coded

FLOAT8 = ("F8_E4M3", "F8_E5M2")
FP4_BLOCK = 32


def _float8_names(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the scales of weight `name` may be called, and those of its inputs, which are not needed: inputs stay in floating point."""
    if name.endswith(".weight"):
        base = name.removesuffix("weight")
        return tuple(f"{base}{end}" for end in ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")), tuple(
            f"{base}{end}" for end in ("activation_scale", "input_scale", "qscale_act")
        )
    return (f"{name}_scale_inv", f"{name}_scale"), (f"{name}_activation_scale", f"{name}_input_scale")


def float8_scales(entries: Entries, name: str) -> list[str]:
    return [scale for scale in _float8_names(name)[0] if scale in entries]


def find_float8(entries: Entries, settings: Settings, raw: Raw) -> Found:
    block = settings.get("weight_block_size", (128, 128))  # the default of transformers' FineGrainedFP8Config
    block = None if block is None else pieces.pair(block, "weight_block_size")
    found = {}
    for name, entry in entries.items():
        scales = float8_scales(entries, name)
        is_fp4 = entry.dtype == "I8" and len(scales) == 1 and entries[scales[0]].dtype in POWERS
        if not (entry.dtype in FLOAT8 or is_fp4) or len(entry.shape) < 2:
            continue
        if not scales:
            raise Refused(
                f"{name} is stored as {entry.dtype}, but has none of {', '.join(_float8_names(name)[0])}: download all files again"
            )
        if len(scales) > 1:
            raise Refused(f"{name} has several scales ({', '.join(scales)}), but one belongs to it: use another conversion of the model")
        unused = tuple(other for other in _float8_names(name)[1] if other in entries)
        pieces.require(entries, scales[0], SCALES + POWERS, name)
        found[name] = _float8(entries, name, scales[0], unused, (1, FP4_BLOCK) if is_fp4 else block, is_fp4)
    return found


def _float8(entries: Entries, name: str, scale: str, unused: tuple[str, ...], block: tuple[int, int] | None, is_fp4: bool) -> Weight:
    entry, (dtype, scale_shape) = entries[name], entries[scale]
    *lead, out, width = entry.shape
    width = 2 * width if is_fp4 else width
    shape = (*lead, out, width)
    kinds = [] if block is None else [(block, packed.grid(shape, block), f"block {pieces.sides(block)}")]
    if not is_fp4:
        kinds += [((1, width), per_row, "per row") for per_row in ((*lead, out, 1), (*lead, out))]
        kinds += [((out, width), per_matrix, "per tensor") for per_matrix in ((*lead, 1, 1), tuple(lead), (1,))]
    fitting = [kind for kind in kinds if kind[1] == scale_shape]
    if not fitting:
        pieces.fit(entries, scale, [kind[1] for kind in kinds], name)
    used, _, words = fitting[0]
    whole = packed.grid(shape, used)

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        values = raw(name)[start:stop]
        values = packed.unpack_fp4(values) if is_fp4 else values
        if math.prod(scale_shape) == 1 < math.prod(whole):  # one for all matrices
            scales = np.broadcast_to(pieces.read_scales(raw, scale, dtype, (1,) * len(whole)), whole)
        else:
            scales = pieces.read_scales(raw, scale, dtype, whole)
        return pieces.rows_of(values, scales, None, used, start, stop, None)

    return coded(shape, f"{'F4_E2M1' if is_fp4 else entry.dtype} {words}", (name, scale, *unused), codes)


def find_mxfp4(entries: Entries, settings: Settings, raw: Raw) -> Found:
    bases = [name.removesuffix("_blocks") for name in entries if name.endswith("_blocks")]
    return {base: _mxfp4(entries, base) for base in bases}


def _mxfp4(entries: Entries, name: str) -> Weight:
    """Stored [E, out, in / 32, 16], read as [E, in, out]: the way round that the same model's bfloat16 files have it."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    shape = pieces.require(entries, blocks, ("U8",), blocks).shape
    if len(shape) != 4 or shape[-1] != FP4_BLOCK // 2:
        raise Refused(f"{blocks} has shape {shape}, but (experts, out, in / 32, 16) is expected: use another conversion of the model")
    pieces.require(entries, scales, ("U8", "F8_E8M0"), blocks)
    pieces.fit(entries, scales, [shape[:-1]], blocks)
    E, out, per_row, _ = shape

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        return Coded(packed.unpack_mxfp4(raw(blocks)[start:stop], raw(scales)[start:stop]), (1, FP4_BLOCK))

    def rows(raw: Raw, start: int, stop: int) -> np.ndarray:
        return codes(raw, start, stop).values().swapaxes(1, 2)

    return Weight((E, per_row * FP4_BLOCK, out), "MXFP4", (blocks, scales), rows, codes, turned=True)
