"""Floor 4: what a model is (`ModelConfig`), the Flax Transformer, and the two programs, `prefill` and `decode_step`."""

from model.config import AttentionConfig, IndexerConfig, LayerConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from model.fit import copied, fit
from model.loop import LAYER_LOOPS, Loop, find_loop, loop_of
from model.rope import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from model.router import RouterConfig
from model.steps import decode_step, prefill
from model.tiles import is_tiled, tiled, transposed, untiled
from model.transformer import Transformer, abstract_params, init_params, stacked
from model.weights import is_matrix, keeps_packed, num_inputs, packed_names, tree_names

__all__ = [
    "LAYER_LOOPS",
    "AttentionConfig",
    "FactorScaling",
    "IndexerConfig",
    "LayerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "Loop",
    "MLAConfig",
    "MLPConfig",
    "MoEConfig",
    "ModelConfig",
    "Rope",
    "RouterConfig",
    "Transformer",
    "YarnScaling",
    "abstract_params",
    "copied",
    "decode_step",
    "find_loop",
    "fit",
    "init_params",
    "is_matrix",
    "is_tiled",
    "keeps_packed",
    "loop_of",
    "num_inputs",
    "packed_names",
    "prefill",
    "stacked",
    "tiled",
    "transposed",
    "tree_names",
    "untiled",
]
