"""GPTQ (as AutoGPTQ and GPTQModel store it) and AWQ (AutoAWQ): integer codes in groups along in."""

import math

from checkpoint import packed, pieces
from checkpoint.pieces import SCALES, Coded, Entries, Found, Raw, Refused, Settings, Weight, coded


def find_gptq(entries: Entries, settings: Settings, raw: Raw) -> Found:
    variant = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if variant not in ("gptq", "gptq_v2"):
        raise Refused(f"GPTQ checkpoint_format {variant!r} is not supported: use one with checkpoint_format gptq or gptq_v2")
    found = {}
    for base in pieces.bases(entries, "qweight"):
        own = {**settings, **_gptq_overrides(settings.get("dynamic") or {}, base)}
        found[f"{base}weight"] = _gptq(entries, base, own, zeros_less_one=variant == "gptq")
    return found


def _gptq_overrides(dynamic: Settings, base: str) -> Settings:
    """GPTQModel's settings per module: the first pattern that the module's name begins with. "-:" names modules that are not quantized."""
    for pattern, own in dynamic.items():
        if pieces.matches(pattern.removeprefix("+:").removeprefix("-:"), base.removesuffix(".")):
            if pattern.startswith("-:"):
                raise Refused(f"{base}qweight is quantized, but {pattern!r} of config.json says that it is not: download all files again")
            return own or {}
    return {}


def _gptq(entries: Entries, base: str, settings: Settings, *, zeros_less_one: bool) -> Weight:
    names = qweight, qzeros, scales = tuple(f"{base}{end}" for end in ("qweight", "qzeros", "scales"))
    g_idx = f"{base}g_idx" if f"{base}g_idx" in entries else None
    bits = pieces.integer(settings, ("bits",), (2, 3, 4, 8).__contains__, "2, 3, 4 or 8")
    words, out = pieces.matrix(entries, qweight)
    if g_idx is not None:
        width = math.prod(pieces.require(entries, g_idx, ("I32", "I64"), qweight).shape)
        pieces.fit(entries, g_idx, [(width,)], qweight)
        pieces.fit(entries, qweight, [(math.ceil(width * bits / 32), out)], g_idx)
    elif settings.get("desc_act"):
        raise Refused(f"{qweight} has no {base}g_idx, though config.json says desc_act: download all files of the model again")
    else:
        width = words * 32 // bits
    size = pieces.group_size(settings, ("group_size",), width)
    groups = math.ceil(width / size)
    pieces.require(entries, qzeros, ("I32",), qweight)
    pieces.require(entries, scales, SCALES, qweight)
    pieces.fit(entries, scales, [(groups, out)], qweight)
    pieces.fit(entries, qzeros, [(groups, math.ceil(out * bits / 32))], qweight)

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        zeros, order = raw(qzeros), None if g_idx is None else pieces.group_order(raw(g_idx), g_idx, size, groups)
        whole = packed.unpack_gptq(raw(qweight)[:, start:stop], zeros, raw(scales), bits=bits, width=width, zeros_less_one=zeros_less_one)
        return Coded(whole, (1, size), bits, order, start)

    ordered = " act-order" if settings.get("desc_act") else ""
    return coded((out, width), f"GPTQ int{bits} g{size}{ordered}", names if g_idx is None else (*names, g_idx), codes)


def find_awq(entries: Entries, settings: Settings, raw: Raw) -> Found:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise Refused(f"AWQ version {version!r} is not supported: use one with version gemm")
    pieces.integer(settings, ("bits", "w_bit"), (4,).__contains__, "4", default=4)
    return {f"{base}weight": _awq(entries, base, settings) for base in pieces.bases(entries, "qweight")}


def _awq(entries: Entries, base: str, settings: Settings) -> Weight:
    names = qweight, qzeros, scales = tuple(f"{base}{end}" for end in ("qweight", "qzeros", "scales"))
    width, words = pieces.matrix(entries, qweight)
    out = words * packed.AWQ_GROUP
    size = pieces.group_size(settings, ("group_size", "q_group_size"), width)
    groups = math.ceil(width / size)
    pieces.require(entries, qzeros, ("I32",), qweight)
    pieces.require(entries, scales, SCALES, qweight)
    pieces.fit(entries, scales, [(groups, out)], qweight)
    pieces.fit(entries, qzeros, [(groups, words)], qweight)

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        first, last = start // packed.AWQ_GROUP, math.ceil(stop / packed.AWQ_GROUP)  # words of a row
        whole = slice(first * packed.AWQ_GROUP, last * packed.AWQ_GROUP)
        values = packed.unpack_awq(raw(qweight)[:, first:last], raw(qzeros)[:, first:last], raw(scales)[:, whole])
        wanted = slice(start - whole.start, stop - whole.start)
        return Coded(packed.Packed(*(part[wanted] for part in values)), (1, size), 4)

    return coded((out, width), f"AWQ int4 g{size}", names, codes)
