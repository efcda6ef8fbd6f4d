"""Floor 1: one operation per file, each with a plain jnp form that runs everywhere; lowerings are chosen inside the operation."""

from kernels.append import append, append_pages, append_ring
from kernels.argmax import argmax
from kernels.attention import Blocks, Scoring, attention, blockwise_attention
from kernels.experts import experts
from kernels.floors import top_k_floor, top_p_floor
from kernels.gumbel import gumbel
from kernels.heads import Heads, apply_rope
from kernels.indexer import blockwise_index_scores, index_scores, top_slots
from kernels.matmul import gated_matmul, head_matmul, matmul
from kernels.native_attention import attend_cache
from kernels.norm import Normed, plain, rms_norm
from kernels.observed import Observed
from kernels.packing import Packing
from kernels.pallas_attention import Held, pallas_attention, pallas_fits
from kernels.quant_array import JoinedArray, QuantArray, is_packed, take_rows, widen, widen_float8
from kernels.row_major import row_major
from kernels.tiled_array import TiledArray, can_tile, tile
from kernels.transposed_array import TransposedArray, can_transpose, transpose

__all__ = [
    "Blocks",
    "Heads",
    "Held",
    "JoinedArray",
    "Normed",
    "Observed",
    "Packing",
    "QuantArray",
    "Scoring",
    "TiledArray",
    "TransposedArray",
    "append",
    "append_pages",
    "append_ring",
    "apply_rope",
    "argmax",
    "attend_cache",
    "attention",
    "blockwise_attention",
    "blockwise_index_scores",
    "can_tile",
    "can_transpose",
    "experts",
    "gated_matmul",
    "gumbel",
    "head_matmul",
    "index_scores",
    "is_packed",
    "matmul",
    "pallas_attention",
    "pallas_fits",
    "plain",
    "rms_norm",
    "row_major",
    "take_rows",
    "tile",
    "top_k_floor",
    "top_p_floor",
    "top_slots",
    "transpose",
    "widen",
    "widen_float8",
]
