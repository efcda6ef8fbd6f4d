"""How weights are to be rounded, and rounding them to the nearest."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels import QuantArray
from kernels.quant_array import EXPONENTS, FLOAT4, FLOAT8, RUN, pack
from runtime import UserError

LARGEST = {"int8": 127.0, "float8": 448.0, "float4": 6.0}  # the largest code; its negative is one too
LEAST_SCALE = float(np.finfo(np.float16).smallest_subnormal)
BITS = {3: "uint3", 4: "uint4", 8: "int8"}
GROUPS = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """
    Attributes:
      code: what a weight becomes; a key of `kernels.quant_array.PLANES`.
      group: neighbours along I that share a scale; None: a whole row.
      rows: neighbouring rows that share it as well. Every row still stores it, so that rows can be split in any way.
      symmetric: no zeros of their own for groups: of `uint` codes, the middle one stands for 0.
      activations: "int8": products round their activations too, with a scale per token; native ones with one for each 32 inputs.
      or_rows: where the group does not divide a row, the whole row is one.
    """

    code: str
    group: int | None = None
    rows: int = 1
    symmetric: bool = True
    activations: str | None = None
    or_rows: bool = False

    def fitted(self, width: int) -> "Scheme":
        """For rows of `width` weights."""
        whole = self.or_rows and self.group is not None and width % self.group
        return dataclasses.replace(self, group=None) if whole else self

    @property
    def bits(self) -> int:
        return int(self.code[-1])

    @property
    def scale_dtype(self) -> np.dtype:
        """f32 for whole rows, where it costs nothing; for groups f16; MXFP4's are powers of two."""
        return EXPONENTS if self.code == "float4" else np.dtype(np.float32 if self.group is None else np.float16)

    def check(self, width: int, what: str) -> None:
        """That rows of `width` weights can be stored so.

        Raises:
          UserError: the group does not divide the width, or codes don't fill bytes.
        """
        group = self.fitted(width).group or width
        if width % group or (group % (RUN // 2) and group != width):
            fitting = [size for size in GROUPS if width % size == 0]
            remedy = f"give one of {', '.join(map(str, fitting))}" if fitting else "use --weights=int8 for this model"
            raise UserError(f"a group of {group} does not divide the {width} inputs of {what}: {remedy}")
        if self.code not in ("int8", "float8") and width % RUN:
            raise UserError(f"{what} has {width} inputs, no multiple of the {RUN} that share bytes at {self.bits} bits: use --weights=int8")


SCHEMES = {
    "int8": Scheme("int8"),
    "w8a8": Scheme("int8", activations="int8"),
    "int4": Scheme("uint4", group=64, symmetric=False),
    "fp8": Scheme("float8"),
    "fp8_block": Scheme("float8", group=128, rows=128),
    "mxfp4": Scheme("float4", group=32),
}


@functools.partial(jax.jit, static_argnames=("scheme",))
def quantize(w: jax.Array, scheme: Scheme) -> QuantArray:
    """Rounds to the nearest.

    Args:
      w: [O..., I], any float dtype.

    Returns:
      As `scheme` says.
    """
    scheme = scheme.fitted(w.shape[-1])
    grouped = grouped_weights(w, scheme)
    scales, zeros = fit_grid(grouped, scheme)
    return assemble(encode(grouped, scales, zeros, scheme), scales, zeros, scheme, w.shape)


def grouped_weights(w: jax.Array, scheme: Scheme) -> jax.Array:
    """f32 [..., groups, weights of one] of [..., I]."""
    width = w.shape[-1]
    return w.astype(jnp.float32).reshape(*w.shape[:-1], -1, width if scheme.group is None else scheme.group)


def fit_grid(grouped: jax.Array, scheme: Scheme, shrink: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array | None]:
    """Scales, in the dtype that stores them, and zeros, such that every group's weights lie within its codes.

    Args:
      grouped: f32 [..., groups, weights of one].
      shrink: broadcastable to [..., groups]: the part of each group's range that is kept; what lies outside is clipped.

    Returns:
      scales [..., groups]; zeros uint8 [..., groups] or None.
    """
    if scheme.code in LARGEST:
        top = shared(jnp.abs(grouped).max(-1), scheme) * shrink
        if (
            scheme.code == "float4"
        ):  # the power of two that OCP MX 1.0 (6.3) names: that of the largest weight over that of the largest code
            exponent = jnp.floor(jnp.log2(jnp.maximum(top, 2.0**-120))) - 2
            return jnp.exp2(jnp.clip(exponent, -127, 127)).astype(EXPONENTS), None
        return stored_scale(top / LARGEST[scheme.code], scheme), None
    highest = 2**scheme.bits - 1
    if scheme.symmetric:  # the largest weight, whichever its sign is, takes the code furthest from the middle one
        least, most = grouped.min(-1), grouped.max(-1)
        top = jnp.where(-least > most, least, most) * shrink
        return stored_scale(top / -((highest + 1) // 2), scheme), None
    least, most = jnp.minimum(grouped.min(-1), 0) * shrink, jnp.maximum(grouped.max(-1), 0) * shrink
    scales = stored_scale((most - least) / highest, scheme)
    zeros = jnp.clip(jnp.round(-least / divisor(scales)), 0, highest)
    return scales, zeros.astype(jnp.uint8)


def encode(grouped: jax.Array, scales: jax.Array, zeros: jax.Array | None, scheme: Scheme) -> jax.Array:
    """The nearest codes, [..., groups, weights of one]: f32, but float8 as it is and of float4 its bits, uint8."""
    steps = grouped / divisor(scales)[..., None]
    if scheme.code == "int8":
        return jnp.clip(jnp.round(steps), -127, 127)
    if scheme.code == "float8":
        return jnp.clip(steps, -448, 448).astype(jnp.float8_e4m3fn)
    if scheme.code == "float4":
        return _float4_bits(steps)
    middle = 2 ** (scheme.bits - 1) if zeros is None else zeros[..., None].astype(jnp.float32)
    return jnp.clip(jnp.round(steps) + middle, 0, 2**scheme.bits - 1)


def decode(codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, scheme: Scheme) -> jax.Array:
    """The weights that codes stand for, f32 [..., groups, weights of one]; codes in any dtype that holds what `encode` gives."""
    wide = jnp.asarray(FLOAT4)[codes.astype(jnp.uint8)] if scheme.code == "float4" else codes.astype(jnp.float32)
    if scheme.code not in LARGEST:
        wide -= 2 ** (scheme.bits - 1) if zeros is None else zeros[..., None].astype(jnp.float32)
    return wide * scales[..., None].astype(jnp.float32)


def assemble(codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, scheme: Scheme, shape: tuple[int, ...]) -> QuantArray:
    """What `encode` and `fit_grid` made, as it is stored; `shape` is that of the weights."""
    codes = codes.astype({"int8": jnp.int8, "float8": FLOAT8}.get(scheme.code, jnp.uint8))
    middle = 2 ** (scheme.bits - 1) if scheme.code.startswith("uint") and zeros is None else 0
    planes = pack(codes.reshape(shape), scheme.code)
    return QuantArray(planes, scales, zeros, code=scheme.code, zero=middle, activations=scheme.activations)


def stored_scale(scales: jax.Array, scheme: Scheme) -> jax.Array:
    """Within the range of the dtype that stores them, and not so near 0 that they become 0."""
    if scheme.scale_dtype != np.float16:
        return scales.astype(scheme.scale_dtype)
    largest = float(np.finfo(np.float16).max)
    kept = jnp.where(jnp.abs(scales) < LEAST_SCALE, jnp.where(scales == 0, 0.0, jnp.copysign(LEAST_SCALE, scales)), scales)
    return jnp.clip(kept, -largest, largest).astype(jnp.float16)


def divisor(scales: jax.Array) -> jax.Array:
    """f32, to divide by: 1 for 0, where all weights are 0."""
    wide = scales.astype(jnp.float32)
    return jnp.where(wide == 0, 1.0, wide)


def shared(top: jax.Array, scheme: Scheme) -> jax.Array:
    """The largest of [..., rows, groups] over the rows that share a scale, for each of them."""
    if scheme.rows == 1:
        return top
    flat = top.reshape(-1, top.shape[-1])
    rows = -(-len(flat) // scheme.rows)
    blocks = jnp.pad(flat, ((0, rows * scheme.rows - len(flat)), (0, 0))).reshape(rows, scheme.rows, -1)
    return jnp.repeat(blocks.max(1), scheme.rows, axis=0)[: len(flat)].reshape(top.shape)


def _float4_bits(steps: jax.Array) -> jax.Array:
    """The nearest E2M1 values' bits, ties to even: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = jnp.abs(steps)
    halves = jnp.round(size * 2)  # 0 to 4: values up to 2 are steps of a half
    bits = jnp.where(size < 2, halves, jnp.where(size < 4, 2 + jnp.round(size), jnp.minimum(4 + jnp.round(size / 2), 7)))
    return jnp.where(steps < 0, bits + 8, bits).astype(jnp.uint8)
