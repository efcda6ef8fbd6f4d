"""How a cache is stored: number format, memory order, and where tokens lie."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kernels import Packing
from kv.codec import QUANTIZED, Codec, Plain, Quantized
from kv.types import LatentSpec, LayerSpec, TensorSpec
from runtime import UserError
from sharding import Placement, axes


@dataclasses.dataclass(frozen=True)
class Format:
    """How a cache is stored; static.

    Attributes:
      dtype: of keys and values: a float, or one of the quantized ones: int8, int4, float8_e4m3fn (e4m3).
      key_order: of a row's axes in memory: S slots, K heads, H elements of a head.
      value_order: likewise. On CPU keys are "KHS" and values "KSH": both products of attention then read their right operand
        as it lies (several times faster for a few queries than "KSH" keys). On TPU, whose tiles are the last two axes, "SKH"
        appends without a temporary of the cache's size.
      lanes: with "SKH" orders, numbers in a row of a tile: heads that do not fill it share a row with others (see `kernels.Packing`); None
        keeps all heads apart. 128 on TPU.
      as_bits: store floats of 8 and 16 bits as unsigned integers, bit for bit. The CPU backend widens an array of such floats whole when it
        writes to it.
      group: channels of a head that share a scale; of the quantized formats.
      page_size: C, tokens per page of a pool that all rows share; None gives every row slots of its own.
      margin: tokens that a row can be rewound by: layers with a window keep that many besides it.
      kernels: "native" has keys and values of f32, bf16 and int8 (in groups of 16 channels and more) written and read by `kernels.cpu`;
        "pallas" has them read by Pallas kernels, for which each head fills rows of `lanes` by itself; "xla" by what JAX compiles.
        `kernels_of` says which layers that is done for.
      round_queries: native kernels round queries, and the weights that values are added up with, to bf16, as keys and values of a bf16
        cache are: processors that multiply bf16 then answer prompts almost twice as fast.
      interpret: run Pallas kernels step by step, on any platform; for tests.
    """

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable
    key_order: str = "KHS"
    value_order: str = "KSH"
    lanes: int | None = None
    as_bits: bool = False
    group: int = 32
    page_size: int | None = None
    margin: int = 64
    kernels: str = "xla"
    round_queries: bool = False
    interpret: bool = False

    def __post_init__(self):
        for name in ("key_order", "value_order"):
            if sorted(value := getattr(self, name)) != ["H", "K", "S"]:
                raise ValueError(f"{name}={value!r} is not an order of the axes S, K and H")
        if self.kernels not in ("xla", "native", "pallas"):
            raise ValueError(f"kernels={self.kernels!r} is none of 'xla', 'native' and 'pallas'")
        if self.kernels == "pallas" and (self.key_order, self.value_order, self.as_bits) != ("SKH", "SKH", False):
            raise ValueError(f"Pallas kernels read floats in the orders 'SKH', not {self.key_order!r} and {self.value_order!r} of bits")
        if self.kernels == "native" and (self.key_order, self.value_order) != ("KHS", "KSH"):
            raise ValueError(f"native kernels read the orders 'KHS' and 'KSH', not {self.key_order!r} and {self.value_order!r}")
        if self.round_queries and (self.kernels, self.dtype) != ("native", jnp.bfloat16):
            raise ValueError(
                f"round_queries is of native kernels with bf16 keys and values, not of {self.kernels} ones with {self.dtype.name}"
            )
        if self.lanes is not None and (self.key_order, self.value_order) != ("SKH", "SKH"):
            raise ValueError(f"lanes={self.lanes} needs the orders 'SKH', not {self.key_order!r} and {self.value_order!r}")
        size = self.page_size
        if size is not None and (size < 1 or size & (size - 1)):
            near = 1 << max(size, 1).bit_length() - 1
            raise UserError(f"page size {size} is not a power of two: give {near} or {2 * near}")
        if self.group < 2 or self.group & (self.group - 1):
            raise UserError(f"a group of {self.group} channels per scale is not a power of two from 2 on: give for example 32")
        if self.margin < 0:
            raise UserError(f"cache margin {self.margin} is below 0: give the tokens that a row may be rewound by")
        self.codec  # noqa: B018 - an unknown dtype is refused here

    @classmethod
    def for_platform(cls, platform: str, dtype: np.dtype, **more) -> "Format":
        """The memory order that suits `cpu`, `gpu` or `tpu`; `more` are fields by name."""
        dtype = np.dtype(dtype)
        if platform == "cpu":
            return cls(dtype, as_bits=dtype == jnp.bfloat16 or dtype in QUANTIZED, **more)
        return cls(dtype, "SKH", "SKH", lanes=128 if platform == "tpu" else None, **more)

    def packings(self, tensor: TensorSpec, placement: Placement | None = None) -> tuple[Packing | None, ...]:
        """How slots share rows in each of the arrays that store a tensor: so that each device's part of the heads fills rows.

        Raises:
          UserError: a page is too small for that.
        """
        parts = self.codec.parts(tensor.width)
        if self.lanes is None:
            return (None,) * len(parts)
        shards = 1 if placement is None else placement.shards(tensor.axis)
        most = self._slots_joined(placement)
        packings = [self._packing(tensor.heads // shards, width, dtype.itemsize, most) for width, dtype in parts]
        if shards > 1 and any(packing is not None and packing.padding for packing in packings):
            raise UserError(
                f"{tensor.heads // shards} heads of {tensor.width} numbers per device, {most} slots at a time, do not fill rows of "
                f"{self.lanes} in a cache of {self.dtype.name}: use --kv=bf16, or fewer shards of heads"
            )
        return tuple(packing and dataclasses.replace(packing, heads=tensor.heads) for packing in packings)

    def _slots_joined(self, placement: Placement | None) -> int:
        """Slots that may share a row at most."""
        stripes = 1 if placement is None else placement.shards(axes.SLOTS)
        return min(64, (self.page_size or 64 * stripes) // stripes)

    def _packing(self, heads: int, width: int, itemsize: int, most: int) -> Packing | None:
        fewest = Packing.to_fill(self.lanes, heads, width, itemsize, most)
        return (Packing.per_head(self.lanes, heads, width, itemsize, most) or fewest) if self.kernels == "pallas" else fewest

    def kernels_of(self, spec: LayerSpec | LatentSpec, placement: Placement | None = None) -> tuple[str, str | None]:
        """Which kernels answer a layer's queries: `self.kernels`, or "xla" and why the others do not."""
        if self.kernels == "xla":
            return "xla", None
        if isinstance(spec, LatentSpec):
            return "xla", "latent attention"
        int8 = self.kernels == "native" and self.dtype == np.int8
        if not int8 and (not isinstance(self.codec, Plain) or self.dtype.itemsize < 2):
            return "xla", f"a cache of {self.dtype.name}"
        if int8 and self.group % 16:
            return "xla", f"a cache of int8 in groups of {self.group}"
        if self.kernels == "native":
            return ("native", None) if placement is None else ("xla", "several devices")
        if self.dtype == np.float16:
            return "xla", "a cache of float16"
        if self.lanes is not None:
            most, slots = self._slots_joined(placement), set()
            for tensor in spec.tensors.values():
                wanted = Packing.per_head(self.lanes, tensor.heads, tensor.width, self.dtype.itemsize, most)
                slots.add(wanted and wanted.slots)
            if None in slots or len(slots) > 1:
                page = "" if self.page_size is None else f" in pages of {self.page_size}"
                return "xla", f"heads of {spec.key_dim} and {spec.value_dim} numbers{page} do not fill rows of {self.lanes}"
        return "pallas", None

    @property
    def codec(self) -> Codec:
        """What encodes and decodes rows."""
        if self.dtype in QUANTIZED:
            return Quantized(self.dtype, self.group, self.as_bits)
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise UserError(f"a cache of {self.dtype.name} is not known: use f32, bf16, f16, int8, int4 or float8_e4m3fn")
        return Plain(self.dtype, self.as_bits)
