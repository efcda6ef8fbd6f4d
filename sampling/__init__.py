"""Floor 6: samplers, the decode loop, and generation at the level of text."""

from sampling.answer import Completion, Timing, TokenLogprobs
from sampling.conversation import Conversation
from sampling.evaluate import Score, evaluate
from sampling.generate import Piece, PromptError, generate, generate_each, stream
from sampling.language_model import DEFAULT_MODEL, LanguageModel, cache_format, load
from sampling.loop import DecodeState, Sampled, decode, first_token
from sampling.options import SamplingOptions, SamplingParams
from sampling.quality import Quality, measure_quality
from sampling.quantize import quantize_model
from sampling.sample import sample

__all__ = [
    "DEFAULT_MODEL",
    "Completion",
    "Conversation",
    "DecodeState",
    "LanguageModel",
    "Piece",
    "PromptError",
    "Quality",
    "Sampled",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "Timing",
    "TokenLogprobs",
    "cache_format",
    "decode",
    "evaluate",
    "first_token",
    "generate",
    "generate_each",
    "load",
    "measure_quality",
    "quantize_model",
    "sample",
    "stream",
]
