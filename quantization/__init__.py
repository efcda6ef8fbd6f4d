"""Floor 2: weights in few bits: how they are rounded, and what is learned from text before they are."""

from quantization.awq import awq
from quantization.gptq import gptq
from quantization.learned import learn
from quantization.schemes import GROUPS, SCHEMES, Scheme, quantize

__all__ = ["GROUPS", "SCHEMES", "Scheme", "awq", "gptq", "learn", "quantize"]
