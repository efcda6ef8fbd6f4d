"""Floor 3: what a model is (`ModelConfig`), the Flax Transformer, and the two programs, `prefill` and `decode_step`."""

from model.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope
from model.steps import decode_step, prefill
from model.transformer import Transformer, abstract_params, init_params

__all__ = [
    "AttentionConfig",
    "LayerConfig",
    "MLPConfig",
    "ModelConfig",
    "Rope",
    "Transformer",
    "abstract_params",
    "decode_step",
    "init_params",
    "prefill",
]
