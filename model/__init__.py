"""Floor 3: what a model is (`ModelConfig`), the Flax Transformer, and the two programs, `prefill` and `decode_step`."""

from model.config import AttentionConfig, IndexerConfig, LayerConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from model.rope import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from model.router import RouterConfig
from model.steps import decode_step, prefill
from model.transformer import Transformer, abstract_params, init_params

__all__ = [
    "AttentionConfig",
    "FactorScaling",
    "IndexerConfig",
    "LayerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "MLAConfig",
    "MLPConfig",
    "MoEConfig",
    "ModelConfig",
    "Rope",
    "RouterConfig",
    "Transformer",
    "YarnScaling",
    "abstract_params",
    "decode_step",
    "init_params",
    "prefill",
]
