"""From the tensors of a checkpoint to the parameter tree: which ones make each weight, and how.

One set of names per family, Hugging Face's; a GGUF file is read under the same names (`checkpoint.gguf_names`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from checkpoint.source import Source
from model import AttentionConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig

Place = tuple[str, ...]  # of a weight in the parameter tree
Parts = Sequence[np.ndarray]  # each is read when it is asked for


@dataclasses.dataclass(frozen=True)
class Weight:
    """How one weight of the tree is made."""

    place: Place
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # names of the tensors, and the shapes that they must have
    make: Callable[[Parts], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Names:
    """A family's names for what all have. `{}` is the expert's number."""

    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"
    norm_offset: float = 0.0  # added to the scales of RMSNorm
    neighbours: bool = False  # rotated pairs stand side by side: their rows are reordered to half and half
    interleaved_experts: bool = False  # all experts in one tensor [E, in, out], rows of gate and up in turns


_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "norm_offset": 1.0,
}
_DEEPSEEK = Names(shared="mlp.shared_experts", neighbours=True)
NAMES: dict[str, Names] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "gemma2": Names(**_SANDWICH),
    "gemma3": Names(**_SANDWICH),
    "gemma3_text": Names(**_SANDWICH),
    "glm4": Names(attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm", neighbours=True),
    "gpt_oss": Names(router="mlp.router", interleaved_experts=True),
    "mixtral": Names(
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{}.w1",
        expert_up="block_sparse_moe.experts.{}.w3",
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    "olmo2": Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
}


def weights(config: ModelConfig, names: Names, source: Source) -> Iterator[Weight]:
    """Every weight of the tree. The source is only asked for names, to choose between layouts that its family comes in."""
    D, known = config.width, source.names()
    yield _one(("embedding",), "model.embed_tokens.weight", (config.vocab_size, D))
    yield _norm(("final_norm", "scale"), "model.norm.weight", D, names)
    if not config.tie_embeddings:
        yield _one(("head",), "lm_head.weight", (config.vocab_size, D))
    for number, layer in enumerate(config.layers):
        place, prefix = (f"layer_{number}",), f"model.layers.{number}."
        before, after = layer.norms in ("pre", "sandwich"), layer.norms in ("post", "sandwich")
        for wanted, norm in ((before, "attention_norm"), (after, "attention_post_norm"), (before, "mlp_norm"), (after, "mlp_post_norm")):
            if wanted:
                yield _norm((*place, norm, "scale"), f"{prefix}{getattr(names, norm)}.weight", D, names)
        attention = _latent if isinstance(layer.attention, MLAConfig) else _grouped
        yield from attention((*place, "attention"), f"{prefix}self_attn.", layer.attention, D, names, known)
        if isinstance(layer.mlp, MoEConfig):
            yield from _mixture((*place, "mlp"), prefix, layer.mlp, D, names)
        else:
            yield from _gated((*place, "mlp"), f"{prefix}mlp", layer.mlp, D, known)


def _one(place: Place, name: str, shape: tuple[int, ...], into: tuple[int, ...] | None = None) -> Weight:
    """A weight that is a tensor, perhaps in another shape."""
    return Weight(place, ((name, shape),), lambda parts: parts[0] if into is None else parts[0].reshape(into))


def _norm(place: Place, name: str, width: int, names: Names, into: tuple[int, ...] | None = None) -> Weight:
    def make(parts: Parts) -> np.ndarray:
        scale = parts[0].astype(np.float32) + np.float32(names.norm_offset)
        return scale if into is None else scale.reshape(into)

    return Weight(place, ((name, (width,)),), make)


def _grouped(place: Place, prefix: str, c: AttentionConfig, D: int, names: Names, known: set[str]) -> Iterator[Weight]:
    N, K, G, H = c.num_heads, c.num_kv_heads, c.queries_per_kv, c.head_dim
    rotated = c.rope.dim if c.rope is not None and names.neighbours else 0

    def joined(parts: Parts) -> np.ndarray:
        if len(parts) == 1:  # all rows of q, then of k, then of v
            parts = np.split(parts[0], [N * H, (N + K) * H])
        q, k, v = (part.reshape(-1, H, *part.shape[1:]) for part in parts)
        q, k = _half_split(q, rotated), _half_split(k, rotated)
        return np.concatenate([part.reshape(K, -1, *part.shape[1:]) for part in (q, k, v)], axis=1)  # [K, G + 2, H, ...]

    def qkv(kind: str, *rest: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if f"{prefix}qkv_proj.{kind}" in known:
            return ((f"{prefix}qkv_proj.{kind}", ((N + 2 * K) * H, *rest)),)
        return tuple((f"{prefix}{part}_proj.{kind}", (heads * H, *rest)) for part, heads in (("q", N), ("k", K), ("v", K)))

    yield Weight((*place, "wqkv"), qkv("weight", D), joined)
    yield _one((*place, "wo"), f"{prefix}o_proj.weight", (D, N * H), (D, K, G, H))
    if c.qkv_bias:
        yield Weight((*place, "bqkv"), qkv("bias"), joined)
    if c.out_bias:
        yield _one((*place, "bo"), f"{prefix}o_proj.bias", (D,))
    if c.qk_norm is not None:
        whole = c.qk_norm == "full"
        yield _norm((*place, "q_norm"), f"{prefix}q_norm.weight", N * H if whole else H, names, (K, G, H) if whole else None)
        yield _norm((*place, "k_norm"), f"{prefix}k_norm.weight", K * H if whole else H, names, (K, H) if whole else None)
    if c.sinks:
        yield _one((*place, "sinks"), f"{prefix}sinks", (N,), (K, G))


def _latent(place: Place, prefix: str, c: MLAConfig, D: int, names: Names, known: set[str]) -> Iterator[Weight]:
    N, C, P, R, V = c.num_heads, c.kv_rank, c.nope_dim, c.rope.dim, c.value_dim
    rotated = R if names.neighbours else 0

    def queries(parts: Parts) -> np.ndarray:
        heads = parts[0].reshape(N, P + R, -1)
        return np.concatenate([heads[:, :P], _half_split(heads[:, P:], rotated)], axis=1)

    def keys(parts: Parts) -> np.ndarray:
        return np.concatenate([parts[0][:C], _half_split(parts[0][None, C:], rotated)[0]])

    if c.q_rank is None:
        yield Weight((*place, "wq"), ((f"{prefix}q_proj.weight", (N * (P + R), D)),), queries)
    else:
        yield _one((*place, "wq_a"), f"{prefix}q_a_proj.weight", (c.q_rank, D))
        yield _norm((*place, "q_norm", "scale"), f"{prefix}q_a_layernorm.weight", c.q_rank, names)
        yield Weight((*place, "wq"), ((f"{prefix}q_b_proj.weight", (N * (P + R), c.q_rank)),), queries)
    yield Weight((*place, "wkv_a"), ((f"{prefix}kv_a_proj_with_mqa.weight", (C + R, D)),), keys)
    yield _norm((*place, "kv_norm", "scale"), f"{prefix}kv_a_layernorm.weight", C, names)
    up = ((f"{prefix}kv_b_proj.weight", (N * (P + V), C)),)  # every head's key rows, then its value rows
    yield Weight((*place, "w_uk"), up, lambda parts: parts[0].reshape(N, P + V, C)[:, :P])
    yield Weight((*place, "w_uv"), up, lambda parts: parts[0].reshape(N, P + V, C)[:, P:])
    yield _one((*place, "wo"), f"{prefix}o_proj.weight", (D, N * V), (D, N, V))
    if c.bias:
        if c.q_rank is not None:
            yield _one((*place, "bq_a"), f"{prefix}q_a_proj.bias", (c.q_rank,))
        yield Weight((*place, "bkv_a"), ((f"{prefix}kv_a_proj_with_mqa.bias", (C + R,)),), keys)
        yield _one((*place, "bo"), f"{prefix}o_proj.bias", (D,))
    if (i := c.indexer) is not None:
        inner = f"{prefix}indexer."
        rank = c.q_rank if c.q_rank is not None else D
        yield _one((*place, "index_wq"), f"{inner}wq_b.weight", (i.num_heads * i.head_dim, rank), (i.num_heads, i.head_dim, rank))
        yield _one((*place, "index_wk"), f"{inner}wk.weight", (i.head_dim, D))
        yield _one((*place, "index_weights"), f"{inner}weights_proj.weight", (i.num_heads, D))
        yield _one((*place, "index_k_norm", "scale"), f"{inner}k_norm.weight", (i.head_dim,))
        yield _one((*place, "index_k_norm", "bias"), f"{inner}k_norm.bias", (i.head_dim,))


def _gated(place: Place, prefix: str, c: MLPConfig, D: int, known: set[str]) -> Iterator[Weight]:
    def pair(kind: str, *rest: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        if f"{prefix}.gate_up_proj.{kind}" in known:  # all rows of gate, then of up
            return ((f"{prefix}.gate_up_proj.{kind}", (2 * c.hidden, *rest)),)
        return tuple((f"{prefix}.{part}_proj.{kind}", (c.hidden, *rest)) for part in ("gate", "up"))

    def both(parts: Parts) -> np.ndarray:
        return parts[0].reshape(2, c.hidden, *parts[0].shape[1:]) if len(parts) == 1 else np.stack(parts)

    yield Weight((*place, "w_gate_up"), pair("weight", D), both)
    yield _one((*place, "w_down"), f"{prefix}.down_proj.weight", (D, c.hidden))
    if c.bias:
        yield Weight((*place, "b_gate_up"), pair("bias"), both)
        yield _one((*place, "b_down"), f"{prefix}.down_proj.bias", (D,))


def _mixture(place: Place, prefix: str, c: MoEConfig, D: int, names: Names) -> Iterator[Weight]:
    E, F = c.router.num_experts, c.expert.hidden
    yield _one((*place, "w_router"), f"{prefix}{names.router}.weight", (E, D))
    if c.router_bias:
        yield _one((*place, "b_router"), f"{prefix}{names.router}.bias", (E,))
    if c.router.choice_bias:
        yield _one((*place, "choice_bias"), f"{prefix}{names.router}.e_score_correction_bias", (E,))
    if names.interleaved_experts:
        all_experts = f"{prefix}mlp.experts."

        def take_turns(parts: Parts) -> np.ndarray:  # [E, D, 2F] or [E, 2F] -> [E, 2, F, ...]
            rows = parts[0].swapaxes(1, 2) if parts[0].ndim == 3 else parts[0]
            return rows.reshape(E, F, 2, *rows.shape[2:]).swapaxes(1, 2)

        yield Weight((*place, "w_gate_up"), ((f"{all_experts}gate_up_proj", (E, D, 2 * F)),), take_turns)
        yield Weight((*place, "w_down"), ((f"{all_experts}down_proj", (E, F, D)),), lambda parts: parts[0].swapaxes(1, 2))
        yield Weight((*place, "b_gate_up"), ((f"{all_experts}gate_up_proj_bias", (E, 2 * F)),), take_turns)
        yield _one((*place, "b_down"), f"{all_experts}down_proj_bias", (E, D))
    else:
        pair, down = (names.expert_gate, names.expert_up), (names.expert_down,)

        def each(wanted: tuple[str, ...], kind: str, *shape: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
            return tuple((f"{prefix}{name.format(e)}.{kind}", shape) for e in range(E) for name in wanted)

        yield Weight((*place, "w_gate_up"), each(pair, "weight", F, D), lambda parts: _stacked(parts).reshape(E, 2, F, D))
        yield Weight((*place, "w_down"), each(down, "weight", D, F), _stacked)
        if c.expert.bias:
            yield Weight((*place, "b_gate_up"), each(pair, "bias", F), lambda parts: _stacked(parts).reshape(E, 2, F))
            yield Weight((*place, "b_down"), each(down, "bias", D), _stacked)
    if c.shared is not None:
        yield from _gated((*place, "shared"), f"{prefix}{names.shared}", c.shared, D, set())
    if c.shared_gate:
        yield _one((*place, "w_shared_gate"), f"{prefix}{names.shared}_gate.weight", (1, D))


def _stacked(parts: Parts) -> np.ndarray:
    """Like `np.stack`, one part at a time: they are read when they are asked for."""
    first = parts[0]
    out = np.empty((len(parts), *first.shape), first.dtype)
    for number in range(len(parts)):
        out[number] = parts[number]
    return out


def _half_split(heads: np.ndarray, rotated: int) -> np.ndarray:
    """Reorders the first `rotated` rows of every head from neighbouring pairs to halves: [heads, H, ...] likewise.

    0 1 2 3 (pairs (0, 1), (2, 3))  ->  0 2 1 3 (pair i with i + rotated / 2), for rotated = 4.
    """
    if not rotated:
        return heads
    order = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, heads.shape[1])])
    return heads[:, order]
