"""compressed-tensors (llm-compressor): a scheme for each group of modules."""

import math
from typing import Any

from checkpoint import packed, pieces
from checkpoint.float_blocks import FLOAT8
from checkpoint.pieces import SCALES, Coded, Entries, Found, Raw, Refused, Settings, Weight, coded

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def find_compressed(entries: Entries, settings: Settings, raw: Raw) -> Found:
    schemes, ignored = _Targets(), _Targets()
    for group in _groups(settings):
        for target in group.get("targets") or ():
            schemes.add(target, group)
    for target in settings.get("ignore") or ():
        ignored.add(target, True)
    found = {}
    for base in sorted({*pieces.bases(entries, "weight_packed"), *pieces.bases(entries, "weight_scale")}):
        module = base.removesuffix(".")
        if ignored.find(module):
            raise Refused(f"{module} is quantized, but config.json ignores it: the files are of different models; download them again")
        group = schemes.find(module) or schemes.find("Embedding" if module.endswith(("embed_tokens", "wte")) else "Linear")
        if group is None:
            raise Refused(f"{module} is quantized, but no config group of config.json targets it: take config.json from the same model")
        find = _packed if group["format"] == "pack-quantized" else _plain
        found[f"{base}weight"] = find(entries, base, group["weights"], raw)
    return found


class _Targets:
    """What was added for a module: for its name or, if there is nothing, for a pattern ("re:...") that its name begins with.

    Where neither is there, compressed-tensors goes by the module's class; that is looked up here as if it were a name.
    """

    def __init__(self):
        self._names: dict[str, Any] = {}  # lists of a thousand names are common
        self._patterns: dict[str, Any] = {}

    def add(self, target: str, value: Any) -> None:
        place = self._patterns if target.startswith("re:") else self._names
        place.setdefault(target.removeprefix("re:"), value)

    def find(self, module: str) -> Any:
        if module in self._names:
            return self._names[module]
        return next((value for pattern, value in self._patterns.items() if pieces.matches(pattern, module)), None)


def _groups(settings: Settings) -> list[dict[str, Any]]:
    """The config groups that quantize weights, each with its format."""
    if (status := settings.get("quantization_status", "compressed")) != "compressed":
        raise Refused(f"quantization_status is {status!r}, but only 'compressed' is supported: save the model compressed")
    for key in ("sparsity_config", "transform_config"):
        value = settings.get(key) or {}
        if value.get("format", "dense") != "dense" or (key == "transform_config" and value.get("config_groups")):
            raise Refused(f"compressed-tensors with a {key} is not supported: use a model that is quantized only")
    groups = []
    for group in (settings.get("config_groups") or {}).values():
        if not group.get("weights"):
            continue
        used = group.get("format") or settings.get("format")
        if used not in FORMATS:
            raise Refused(f"compressed-tensors format {used!r} is not supported: use one of {', '.join(FORMATS)}")
        groups.append({**group, "format": used})
    return groups


def _block(weights: Settings, shape: tuple[int, ...]) -> tuple[tuple[int, int], str]:
    """The weights that share a scale, and that in words."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "tensor":
        return shape[-2:], "per tensor"
    if strategy == "channel":
        return (1, shape[-1]), "per row"
    if strategy == "group":
        size = pieces.integer(weights, ("group_size",), lambda value: value > 0, "a positive number")
        return (1, size), f"g{size}"
    if strategy == "block":
        block = pieces.pair(weights.get("block_structure"), "block_structure")
        return block, f"block {pieces.sides(block)}"
    raise Refused(f"compressed-tensors strategy {strategy!r} for weights is not supported: use tensor, channel, group or block")


def _scale(entries: Entries, name: str, codes: str, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape that the scales are brought into."""
    whole = packed.grid(shape, block)
    pieces.require(entries, name, SCALES, codes)
    shapes = [whole, *([whole[:-1]] if whole[-1] == 1 else []), *([()] if math.prod(whole) == 1 else [])]
    pieces.fit(entries, name, shapes, codes)
    return whole


def _unused(entries: Entries, base: str) -> tuple[str, ...]:
    """The scales of a module's inputs and outputs, which are not needed: they stay in floating point."""
    ends = (f"{side}_{what}" for side in ("input", "output") for what in ("scale", "zero_point"))
    return tuple(f"{base}{end}" for end in ends if f"{base}{end}" in entries)


def _plain(entries: Entries, base: str, weights: Settings, raw: Raw) -> Weight:
    """A code per element: int8 or float8."""
    name, scale, zero = f"{base}weight", f"{base}weight_scale", f"{base}weight_zero_point"
    entry = pieces.require(entries, name, ("I8", *FLOAT8), scale)
    if len(entry.shape) < 2 or not all(entry.shape):
        raise Refused(f"{name} has shape {entry.shape}, but a quantized weight has 2 dimensions or more: use another conversion")
    block, words = _block(weights, entry.shape)
    whole = _scale(entries, scale, name, entry.shape, block)
    names = (name, scale, *_unused(entries, base))
    if has_zeros := zero in entries:
        pieces.require(entries, zero, ("I8", *FLOAT8, *SCALES), name)
        pieces.fit(entries, zero, [entries[scale].shape], scale)
        names = (*names, zero)
    elif weights.get("symmetric") is False:
        raise Refused(f"{name} is asymmetric, but has no {zero}: download all files of the model again")

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        zeros = raw(zero).reshape(whole) if has_zeros else None
        scales = pieces.read_scales(raw, scale, entries[scale].dtype, whole)
        return pieces.rows_of(raw(name)[start:stop], scales, zeros, block, start, stop, 8 if entry.dtype == "I8" else None)

    return coded(entry.shape, f"{'int8' if entry.dtype == 'I8' else entry.dtype} {words}", names, codes)


def _packed(entries: Entries, base: str, weights: Settings, raw: Raw) -> Weight:
    """Several codes per int32."""
    ends = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    name, scale, shape_name, zero, g_idx = (f"{base}{end}" for end in ends)
    bits = pieces.integer(weights, ("num_bits",), (2, 4, 8).__contains__, "2, 4 or 8")
    if weights.get("type", "int") != "int":
        raise Refused(f"{name} has codes of type {weights['type']!r}, but pack-quantized holds integers: use another conversion")
    pieces.matrix(entries, name)
    if math.prod(pieces.require(entries, shape_name, ("I64", "I32"), name).shape) != 2:
        raise Refused(
            f"{shape_name} has shape {entries[shape_name].shape}, but (2,) goes with {name} {entries[name].shape}: download it again"
        )
    out, width = shape = tuple(int(side) for side in raw(shape_name))
    if entries[name].shape != (out, math.ceil(width * bits / 32)):
        raise Refused(
            f"{name} has shape {entries[name].shape}, but {shape_name} says that {shape} {bits}-bit weights are packed, which needs "
            f"{(out, math.ceil(width * bits / 32))}: the files are damaged; download them again"
        )
    block, words = _block(weights, shape)
    whole = _scale(entries, scale, name, shape, block)
    names = (name, scale, shape_name, *(end for end in (zero, g_idx) if end in entries), *_unused(entries, base))
    zeros_packed = zero in entries and pieces.require(entries, zero, ("I32", "I8"), name).dtype == "I32"
    if zero in entries:
        pieces.fit(entries, zero, [(math.ceil(whole[0] * bits / 32), whole[1])] if zeros_packed else [entries[scale].shape], scale)
    elif weights.get("symmetric") is False:
        raise Refused(f"{name} is asymmetric, but has no {zero}: download all files of the model again")
    if g_idx in entries:
        pieces.require(entries, g_idx, ("I32", "I64"), name)
        pieces.fit(entries, g_idx, [(width,)], name)

    def codes(raw: Raw, start: int, stop: int) -> Coded:
        zeros = raw(zero) if zero in entries else None
        if zeros_packed:
            zeros = packed.unpack_zeros(zeros, bits=bits, rows=whole[0])
        zeros = zeros if zeros is None else zeros.reshape(whole)
        scales = pieces.read_scales(raw, scale, entries[scale].dtype, whole)
        values = packed.unpack_int32(raw(name)[start:stop], scales, zeros, bits=bits, width=width)
        order = raw(g_idx) if g_idx in entries else None
        if order is not None and (order == -1).all():  # written, but not in use
            order = None
        order = order if order is None else pieces.group_order(order, g_idx, block[1], whole[1])
        return Coded(values, block, bits, order, start)

    return coded(shape, f"int{bits} {words}", names, codes)
