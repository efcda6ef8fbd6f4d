"""Floor 0: one operation per file, each with a plain jnp form that runs everywhere; lowerings are chosen inside the operation."""

from kernels.append import append
from kernels.attention import attention, blockwise_attention
from kernels.matmul import matmul

__all__ = ["append", "attention", "blockwise_attention", "matmul"]
