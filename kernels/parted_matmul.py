"""The product with packed weights on accelerators: one operation, which reads them packed.

XLA fuses what widens a weight into the product's operand as long as that goes number by number. A scale that is repeated for its group, or
a byte that is repeated for its two codes, and *then reshaped* to the one axis of inputs, does not: the TPU's compiler writes each
repetition out, in f32, and reads it back. So nothing is reshaped here: the inputs stay in parts, and the product sums over all of them.

    uint4, groups of 64:  w [O, groups, 2 runs, 2 codes of a byte, 16 bytes]     x [R, groups, 2, 2, 16]
    a scale per row:      it multiplies the sums, and only codes are widened, which the GPU's compiler fuses as well

Codes of a byte that have groups (`fp8_block`) are the exception: XLA joins their two parts again, and widens a matrix right before its
product.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.quant_array import PLANES, RUN, WHOLE, QuantArray, float4_values, scaled, widen_codes


class Parts(NamedTuple):
    """Sizes that I is the product of: first those that count the groups, then those within a group. None is 1."""

    groups: tuple[int, ...]
    within: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.groups + self.within


def parted_matmul(x: jax.Array, w: QuantArray) -> jax.Array:
    """x times w over the last axis of both; the operands are in x's dtype, the sums f32.

    The barrier ties codes of less than a byte to the activations: else the compiler would unpack them ahead of a decode loop, and read the
    bytes in each step. Codes of a byte it leaves as they are, and behind a barrier it would copy each layer's out of a stack of layers.

    Args:
      x: [R, I].
      w: [O..., I], without scales or an order of its inputs.

    Returns:
      f32 [R, O...].
    """
    if w.code not in WHOLE:
        x, w = jax.lax.optimization_barrier((x, w))
    parts = parts_of(w)
    # Of split weights sums are communicated, in x's dtype unless something in f32 follows: their scales stay inside.
    scale_sums = w.scales.shape[-1] == 1 and w.offsets is None and not w.spread
    wide = w.widen() if parts is None else _widen(w, parts, not scale_sums)  # f32 [O..., *parts]
    x = x.reshape(len(x), *wide.shape[w.ndim - 1 :])
    dims = (tuple(range(1, x.ndim)), tuple(range(w.ndim - 1, wide.ndim))), ((), ())
    out = jax.lax.dot_general(x, wide.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    return out * scaled(w.scales, w.super_scales)[..., 0] if scale_sums else out


def parts_of(w: QuantArray) -> Parts | None:
    """None where codes share bytes across groups (those are neither whole runs nor half a run): then the inputs are one axis."""
    groups, width = w.scales.shape[-1], w.shape[-1]
    if w.code in WHOLE:
        return Parts(_above_1(groups), (width // groups,))
    sizes = [8 // bits for bits in PLANES[w.code]]  # codes that a byte of each plane holds: each divides the next
    if groups == 1 or width // groups % RUN == 0:
        return Parts(_above_1(groups), _above_1(width // groups // RUN, *_steps(1, *sizes, RUN)))
    return Parts(_above_1(groups // 2, 2), _above_1(*_steps(2, *sizes, RUN))) if 2 * width == groups * RUN else None


def _steps(*sizes: int) -> list[int]:
    """What each size is the one before times."""
    return [after // before for before, after in itertools.pairwise(sizes)]


def _above_1(*sizes: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size > 1)


def _widen(w: QuantArray, parts: Parts, with_scales: bool) -> jax.Array:
    """f32 [O..., *parts.sizes]: `QuantArray.widen`, in parts."""

    def spread(values: jax.Array) -> jax.Array:
        """[O..., groups], to be broadcast to each group's codes."""
        return values.astype(jnp.float32).reshape(*w.shape[:-1], *parts.groups, *(1,) * len(parts.within))

    wide = _codes(w, parts.sizes)
    if w.zeros is not None:
        wide -= spread(w.zeros)
    if w.zero:
        wide -= w.zero
    if with_scales:
        wide *= spread(scaled(w.scales, w.super_scales))
    if w.offsets is not None:
        offsets = spread(scaled(w.offsets, w.super_offsets))
        wide = wide + offsets if w.super_offsets is None else wide - offsets
    return wide


def _codes(w: QuantArray, sizes: tuple[int, ...]) -> jax.Array:
    """f32 [O..., *sizes]: the codes as numbers."""
    if w.code in WHOLE:
        return widen_codes((w.planes[0].reshape(*w.shape[:-1], *sizes),), w.code)
    whole, below = None, 0
    runs = _last(sizes, RUN)
    for bits, plane in zip(PLANES[w.code], w.planes, strict=True):
        many = 8 // bits
        bytes_ = _last(sizes, RUN // many)
        ones = (1,) * (bytes_ - runs)
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(*sizes[runs:bytes_], *(1,) * (len(sizes) - bytes_))
        codes = (plane.reshape(*w.shape[:-1], *sizes[:runs], *ones, *sizes[bytes_:]) >> shifts) & np.uint8(2**bits - 1)
        whole = codes if whole is None else whole | (codes << np.uint8(below))
        below += bits
    return float4_values(whole) if w.code == "float4" else whole.astype(jnp.float32)


def _last(sizes: tuple[int, ...], product: int) -> int:
    """Where the last sizes begin that make up `product`."""
    return max(at for at in range(len(sizes)) if math.prod(sizes[at:]) == product)
