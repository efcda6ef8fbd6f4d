"""What a model is, as frozen data: one spec per layer, so that hybrids need no second model file."""

import dataclasses

import kv
from model.rope import Rope
from model.router import RouterConfig
from runtime import UserError

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
NORMS = ("pre", "post", "sandwich")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rope: Rope | None  # None: the layer sees no positions (NoPE)
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    window: int | None = None  # tokens that a query sees, its own included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # one more logit per head that takes probability and gives no value
    qk_norm: str | None = None  # RMSNorm of q and k before the rotation: "head" over each head, "full" over all heads at once
    qkv_bias: bool = False
    out_bias: bool = False
    kv_copies: int = 1  # times that each KV head of the checkpoint stands, one beside the other; num_kv_heads counts all of them

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: the checkpoint's metadata is damaged"
            )
        if self.kv_copies < 1 or self.num_kv_heads % self.kv_copies:
            raise UserError(f"num_kv_heads {self.num_kv_heads} is not a multiple of kv_copies {self.kv_copies}: the metadata is damaged")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise UserError(f"rotary embedding of {self.rope.dim} elements does not fit head_dim {self.head_dim}: the metadata is damaged")
        if self.window is not None and self.window < 1:
            raise UserError(f"attention window {self.window} is below 1: the checkpoint's metadata is damaged")
        if self.qk_norm not in (None, "head", "full"):
            raise ValueError(f"qk_norm={self.qk_norm!r} is not known: use None, 'head' or 'full'")

    @property
    def ropes(self) -> tuple[Rope | None]:
        """The rotations that the layer's forward is given tables of."""
        return (self.rope,)

    @property
    def queries_per_kv(self) -> int:  # G
        return self.num_heads // self.num_kv_heads

    @property
    def spec(self) -> kv.AttentionSpec:
        """What the cache needs to know to answer this layer's queries."""
        return kv.AttentionSpec(scale=self.head_dim**-0.5 if self.scale is None else self.scale, window=self.window, softcap=self.softcap)

    @property
    def cache_layer(self) -> kv.LayerSpec:
        """What this layer keeps per token."""
        return kv.LayerSpec(num_kv_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim, window=self.window)


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """DeepSeek Sparse Attention's lightning indexer (DeepSeek-V3.2, 2025): picks the tokens that a query attends to."""

    num_heads: int
    head_dim: int
    top_k: int  # tokens that a query sees at most
    rope: Rope  # of the first elements of its queries and keys


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 2024, arXiv 2405.04434): keys and values of all heads are projections of one latent row,
    which is all that the cache keeps (see `kv.latent`)."""

    num_heads: int  # N
    q_rank: int | None  # width of the queries' own latent; None: they are projected from x
    kv_rank: int  # C: the latent's width
    nope_dim: int  # of a head's query and key, not rotated
    rope: Rope  # its `dim` is the rotated part's size
    value_dim: int  # Hv
    scale: float
    indexer: IndexerConfig | None = None
    bias: bool = False

    @property
    def ropes(self) -> tuple[Rope | None, Rope | None]:
        """The rotations that the layer's forward is given tables of: the heads', and the indexer's."""
        return self.rope, None if self.indexer is None else self.indexer.rope

    @property
    def spec(self) -> kv.AttentionSpec:
        """What the cache needs to know to answer this layer's queries."""
        return kv.AttentionSpec(scale=self.scale, top_k=None if self.indexer is None else self.indexer.top_k)

    @property
    def cache_layer(self) -> kv.LatentSpec:
        """What this layer keeps per token."""
        return kv.LatentSpec(self.kv_rank, self.rope.dim, 0 if self.indexer is None else self.indexer.head_dim)


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Gated MLP: down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    hidden: int  # F
    activation: str = "silu"  # "clamped_swiglu" (gpt-oss, arXiv 2508.10925): (up + 1) * gate * sigmoid(alpha * gate), both clamped
    bias: bool = False
    limit: float = 7.0  # of the clamped kind
    alpha: float = 1.702

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not known: use one of {', '.join(ACTIVATIONS)}")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: each token goes through `router.top_k` of the experts, and through the shared one if there is one."""

    router: RouterConfig
    expert: MLPConfig
    shared: MLPConfig | None = None
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid of x
    router_bias: bool = False  # added to the router's logits


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    attention: AttentionConfig | MLAConfig
    mlp: MLPConfig | MoEConfig
    norms: str = "pre"  # where RMSNorm stands: "pre" the part (f), "post" it, or both ("sandwich"): x + norm(f(norm(x)))

    def __post_init__(self):
        if self.norms not in NORMS:
            raise ValueError(f"norms={self.norms!r} is not known: use one of {', '.join(NORMS)}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer. Hashable: it is the static argument of every jitted program."""

    vocab_size: int  # V
    width: int  # D
    layers: tuple[LayerConfig, ...]  # L of them
    norm_eps: float
    tie_embeddings: bool
    context_length: int  # tokens: the longest position that the model was trained on
    embedding_scale: float = 1.0  # multiplies the embedding
    final_softcap: float | None = None  # of the logits
    vocab_padding: int = 0  # of the V rows of embedding and head, the last ones that stand for no token and are never sampled

    def __post_init__(self):
        if self.vocab_padding and not 0 < self.vocab_padding < self.vocab_size:
            raise UserError(f"vocab_padding {self.vocab_padding} is not within 0 to vocab_size {self.vocab_size}: the metadata is damaged")

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary, without what pads it."""
        return self.vocab_size - self.vocab_padding

    @property
    def cache_layers(self) -> tuple[kv.LayerSpec | kv.LatentSpec, ...]:
        """What each layer keeps per token: `kv.init` allocates from this."""
        return tuple(layer.attention.cache_layer for layer in self.layers)
