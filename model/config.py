"""What a model is, as frozen data: one spec per layer, so that hybrids need no second model file."""

import dataclasses

import kv
from runtime import UserError


@dataclasses.dataclass(frozen=True, order=True)  # ordered: its tables are a dict, whose keys JAX sorts
class Rope:
    """Rotary position embedding over the whole head, half-split pairs (Su et al. 2021, arXiv 2104.09864; NeoX order)."""

    theta: float


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rope: Rope | None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: the checkpoint's metadata is damaged"
            )
        if self.head_dim % 2 and self.rope is not None:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embedding needs an even head size")

    @property
    def queries_per_kv(self) -> int:  # G
        return self.num_heads // self.num_kv_heads

    @property
    def spec(self) -> kv.AttentionSpec:
        """What the cache needs to know to answer this layer's queries."""
        return kv.AttentionSpec(scale=self.head_dim**-0.5)


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

    hidden: int  # F


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    attention: AttentionConfig
    mlp: MLPConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer. Hashable: it is the static argument of every jitted program."""

    vocab_size: int  # V
    width: int  # D
    layers: tuple[LayerConfig, ...]  # L of them
    norm_eps: float
    tie_embeddings: bool
    context_length: int  # tokens: the longest position that the model was trained on

    @property
    def cache_layers(self) -> tuple[kv.LayerSpec, ...]:
        """What each layer keeps per token: `kv.init` allocates from this."""
        return tuple(
            kv.LayerSpec(num_kv_heads=layer.attention.num_kv_heads, key_dim=layer.attention.head_dim, value_dim=layer.attention.head_dim)
            for layer in self.layers
        )
