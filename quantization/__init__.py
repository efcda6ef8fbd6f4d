"""Floor 1: weights in few bits: how they are rounded, and what is learned from text before they are."""

from quantization.awq import awq
from quantization.gptq import gptq
from quantization.learned import learn
from quantization.schemes import SCHEMES, Scheme, quantize

__all__ = ["SCHEMES", "Scheme", "awq", "gptq", "learn", "quantize"]
