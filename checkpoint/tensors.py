"""From the tensors of a checkpoint to the parameter tree: which ones make each weight, and how.

One set of names per family, Hugging Face's; a GGUF file is read under the same names (`checkpoint.gguf_names`).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from checkpoint.source import Box, Source
from checkpoint.weight import Index, Parts, Place, Weight, copied, one, padded, side_by_side, stacked, whole_rows
from model import AttentionConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig


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
    yield padded(one(("embedding",), "model.embed_tokens.weight", (config.num_tokens, D)), config.vocab_padding)
    yield _norm(("final_norm", "scale"), "model.norm.weight", D, names)
    if not config.tie_embeddings:
        yield padded(one(("head",), "lm_head.weight", (config.num_tokens, D)), config.vocab_padding)
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


def _norm(place: Place, name: str, width: int, names: Names, into: tuple[int, ...] | None = None) -> Weight:
    return one(place, name, (width,), into, lambda scale: scale.astype(np.float32) + np.float32(names.norm_offset))


def _grouped(place: Place, prefix: str, c: AttentionConfig, D: int, names: Names, known: set[str]) -> Iterator[Weight]:
    N, K, G, H = c.num_heads, c.num_kv_heads, c.queries_per_kv, c.head_dim
    held = K // c.kv_copies  # of the checkpoint's KV heads
    rotated = c.rope.dim if c.rope is not None and names.neighbours else 0

    def joined(kind: str, name: str, *rest: int) -> Weight:
        """[K, G + 2, H, ...] of the rows of q, k and v, which are tensors of their own or follow one another in one."""
        fused = f"{prefix}qkv_proj.{kind}"

        def heads(part: str, first: int, rotated: int) -> Weight:
            """[K, G, H, ...] of the queries, [K, 1, H, ...] of keys or values; `first`: their first head in a fused tensor."""
            count, each = (N, G) if part == "q" else (held, 1)
            tensor, whole = (fused, (N + 2 * held) * H) if fused in known else (f"{prefix}{part}_proj.{kind}", count * H)
            before = first * H if fused in known else 0  # rows

            def own(index: Index) -> tuple[int, int]:
                start, stop = index[0]
                return (start * G, stop * G) if part == "q" else (start // c.kv_copies, -(-stop // c.kv_copies))

            def reads(index: Index) -> list[tuple[str, Box]]:
                start, stop = own(index)
                return [(tensor, (slice(before + start * H, before + stop * H), *(slice(*part) for part in index[3:])))]

            def make(parts: Parts, index: Index) -> np.ndarray:
                rows = parts[0]
                rows = _half_split(rows.reshape(-1, H, *rows.shape[1:]), rotated)
                if part != "q" and c.kv_copies > 1:
                    rows = rows[np.arange(*index[0]) // c.kv_copies - own(index)[0]]
                return rows.reshape(-1, each, *rows.shape[1:])

            return Weight((*place, name), (K, each, H, *rest), ((tensor, (whole, *rest)),), reads, make, frozenset({0, 3} if rest else {0}))

        return side_by_side(1, [heads("q", 0, rotated), heads("k", N, rotated), heads("v", N + held, 0)])

    yield joined("weight", "wqkv", D)
    yield one((*place, "wo"), f"{prefix}o_proj.weight", (D, N * H), (D, K, G, H), inputs=3)
    if c.qkv_bias:
        yield joined("bias", "bqkv")
    if c.out_bias:
        yield one((*place, "bo"), f"{prefix}o_proj.bias", (D,))
    if c.qk_norm is not None:
        whole = c.qk_norm == "full"
        yield _norm((*place, "q_norm"), f"{prefix}q_norm.weight", N * H if whole else H, names, (K, G, H) if whole else None)
        k_norm = _norm((*place, "k_norm"), f"{prefix}k_norm.weight", held * H if whole else H, names, (held, H) if whole else None)
        yield copied(k_norm, c.kv_copies) if whole else k_norm
    if c.sinks:
        yield one((*place, "sinks"), f"{prefix}sinks", (N,), (K, G))


def _latent(place: Place, prefix: str, c: MLAConfig, D: int, names: Names, known: set[str]) -> Iterator[Weight]:
    N, C, P, R, V = c.num_heads, c.kv_rank, c.nope_dim, c.rope.dim, c.value_dim
    rotated = R if names.neighbours else 0

    def queries(heads: np.ndarray) -> np.ndarray:
        return np.concatenate([heads[:, :P], _half_split(heads[:, P:], rotated)], axis=1)

    def keys(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[:C], _half_split(rows[None, C:], rotated)[0]])

    def part_of_up(name: str, first: int, count: int) -> Weight:
        """[N, count, C]: of every head's key rows, then its value rows."""
        whole = one((*place, name), f"{prefix}kv_b_proj.weight", (N * (P + V), C), (N, P + V, C))

        def make(parts: Parts, index: Index) -> np.ndarray:
            return whole.make(parts, (index[0], (0, P + V), index[2]))[:, first : first + count]

        return Weight(
            whole.place, (N, count, C), whole.parts, lambda index: whole.reads((index[0], (0, P + V), index[2])), make, whole.axes
        )

    if c.q_rank is None:
        yield one((*place, "wq"), f"{prefix}q_proj.weight", (N * (P + R), D), (N, P + R, D), queries)
    else:
        yield one((*place, "wq_a"), f"{prefix}q_a_proj.weight", (c.q_rank, D))
        yield _norm((*place, "q_norm", "scale"), f"{prefix}q_a_layernorm.weight", c.q_rank, names)
        yield one((*place, "wq"), f"{prefix}q_b_proj.weight", (N * (P + R), c.q_rank), (N, P + R, c.q_rank), queries)
    yield whole_rows(one((*place, "wkv_a"), f"{prefix}kv_a_proj_with_mqa.weight", (C + R, D), change=keys))
    yield _norm((*place, "kv_norm", "scale"), f"{prefix}kv_a_layernorm.weight", C, names)
    yield part_of_up("w_uk", 0, P)
    yield part_of_up("w_uv", P, V)
    yield one((*place, "wo"), f"{prefix}o_proj.weight", (D, N * V), (D, N, V), inputs=2)
    if c.bias:
        if c.q_rank is not None:
            yield one((*place, "bq_a"), f"{prefix}q_a_proj.bias", (c.q_rank,))
        yield whole_rows(one((*place, "bkv_a"), f"{prefix}kv_a_proj_with_mqa.bias", (C + R,), change=keys))
        yield one((*place, "bo"), f"{prefix}o_proj.bias", (D,))
    if (i := c.indexer) is not None:
        inner = f"{prefix}indexer."
        rank = c.q_rank if c.q_rank is not None else D
        yield one((*place, "index_wq"), f"{inner}wq_b.weight", (i.num_heads * i.head_dim, rank), (i.num_heads, i.head_dim, rank))
        yield one((*place, "index_wk"), f"{inner}wk.weight", (i.head_dim, D))
        yield one((*place, "index_weights"), f"{inner}weights_proj.weight", (i.num_heads, D))
        yield one((*place, "index_k_norm", "scale"), f"{inner}k_norm.weight", (i.head_dim,))
        yield one((*place, "index_k_norm", "bias"), f"{inner}k_norm.bias", (i.head_dim,))


def _gated(place: Place, prefix: str, c: MLPConfig, D: int, known: set[str]) -> Iterator[Weight]:
    F = c.hidden

    def pair(kind: str, name: str, *rest: int) -> Weight:
        """[2, F, ...] of the rows of gate and up, which are tensors of their own or follow one another in one."""
        fused = f"{prefix}.gate_up_proj.{kind}"

        def half(part: str, first: int) -> Weight:
            """[1, F, ...]"""
            tensor, whole, before = (fused, 2 * F, first) if fused in known else (f"{prefix}.{part}_proj.{kind}", F, 0)

            def reads(index: Index) -> list[tuple[str, Box]]:
                (start, stop), *others = index[1:]
                return [(tensor, (slice(before + start, before + stop), *(slice(*each) for each in others)))]

            axes = frozenset(range(1, 2 + len(rest)))
            return Weight((*place, name), (1, F, *rest), ((tensor, (whole, *rest)),), reads, lambda parts, _: parts[0][None], axes)

        return side_by_side(0, [half("gate", 0), half("up", F)])

    yield pair("weight", "w_gate_up", D)
    yield one((*place, "w_down"), f"{prefix}.down_proj.weight", (D, F))
    if c.bias:
        yield pair("bias", "b_gate_up")
        yield one((*place, "b_down"), f"{prefix}.down_proj.bias", (D,))


def _mixture(place: Place, prefix: str, c: MoEConfig, D: int, names: Names) -> Iterator[Weight]:
    E, F = c.router.num_experts, c.expert.hidden
    yield one((*place, "w_router"), f"{prefix}{names.router}.weight", (E, D))
    if c.router_bias:
        yield one((*place, "b_router"), f"{prefix}{names.router}.bias", (E,))
    if c.router.choice_bias:
        yield one((*place, "choice_bias"), f"{prefix}{names.router}.e_score_correction_bias", (E,))
    if names.interleaved_experts:
        all_experts = f"{prefix}mlp.experts."

        def in_turns(name: str, kind: str, *rest: int) -> Weight:
            """[E, 2, F, ...] of rows of gate and up in turns; those of matrices are their last axis: [E, D, 2F]."""

            def reads(index: Index) -> list[tuple[str, Box]]:
                experts, _, (start, stop), *others = index
                return [(f"{all_experts}{kind}", tuple(slice(*each) for each in (experts, *others, (2 * start, 2 * stop))))]

            def make(parts: Parts, index: Index) -> np.ndarray:
                rows = np.moveaxis(parts[0], -1, 1)
                return rows.reshape(len(rows), -1, 2, *rows.shape[2:]).swapaxes(1, 2)

            def packed_reads(index: Index) -> list[tuple[str, Box]]:
                experts, _, (start, stop), *others = index
                return [(f"{all_experts}{kind}", tuple(slice(*each) for each in (experts, (2 * start, 2 * stop), *others)))]

            def packed_make(parts: Parts, index: Index) -> np.ndarray:
                rows = parts[0]  # [E, 2F, D]
                return rows.reshape(len(rows), -1, 2, *rows.shape[2:]).swapaxes(1, 2)

            axes, tensors = frozenset({0, 2, 3} if rest else {0, 2}), ((f"{all_experts}{kind}", (E, *rest, 2 * F)),)
            return Weight((*place, name), (E, 2, F, *rest), tensors, reads, make, axes, turned=(packed_reads, packed_make))

        def down_reads(index: Index) -> list[tuple[str, Box]]:
            return [(f"{all_experts}down_proj", tuple(slice(*index[axis]) for axis in (0, 2, 1)))]

        def down_packed(index: Index) -> list[tuple[str, Box]]:
            return [(f"{all_experts}down_proj", tuple(slice(*each) for each in index))]

        yield in_turns("w_gate_up", "gate_up_proj", D)
        down = ((f"{all_experts}down_proj", (E, F, D)),)
        turned, axes = (down_packed, lambda parts, _: parts[0]), frozenset({0, 1, 2})
        yield Weight((*place, "w_down"), (E, D, F), down, down_reads, lambda parts, _: parts[0].swapaxes(1, 2), axes, turned=turned)
        yield in_turns("b_gate_up", "gate_up_proj_bias")
        yield one((*place, "b_down"), f"{all_experts}down_proj_bias", (E, D))
    else:

        def each(name: str, part: str, kind: str, shape: tuple[int, ...], lead: tuple[int, ...] = (E,)) -> Weight:
            """[*lead, ...] of a tensor per expert; lead is E, and perhaps a 1."""

            def reads(index: Index) -> list[tuple[str, Box]]:
                box = tuple(slice(*bounds) for bounds in index[len(lead) :])
                return [(f"{prefix}{part.format(e)}.{kind}", box) for e in range(*index[0])]

            def make(parts: Parts, index: Index) -> np.ndarray:
                rows = stacked(parts)
                return rows.reshape(-1, *lead[1:], *rows.shape[1:])

            tensors = tuple((f"{prefix}{part.format(e)}.{kind}", shape) for e in range(E))
            axes = frozenset({0, *range(len(lead), len(lead) + len(shape))})
            return Weight((*place, name), (*lead, *shape), tensors, reads, make, axes)

        def pair(name: str, kind: str, *shape: int) -> Weight:
            """[E, 2, ...]"""
            return side_by_side(1, [each(name, part, kind, shape, (E, 1)) for part in (names.expert_gate, names.expert_up)])

        yield pair("w_gate_up", "weight", F, D)
        yield each("w_down", names.expert_down, "weight", (D, F))
        if c.expert.bias:
            yield pair("b_gate_up", "bias", F)
            yield each("b_down", names.expert_down, "bias", (D,))
    if c.shared is not None:
        yield from _gated((*place, "shared"), f"{prefix}{names.shared}", c.shared, D, set())
    if c.shared_gate:
        yield one((*place, "w_shared_gate"), f"{prefix}{names.shared}_gate.weight", (1, D))


def _half_split(heads: np.ndarray, rotated: int) -> np.ndarray:
    """Reorders the first `rotated` rows of every head from neighbouring pairs to halves: [heads, H, ...] likewise.

    0 1 2 3 (pairs (0, 1), (2, 3))  ->  0 2 1 3 (pair i with i + rotated / 2), for rotated = 4.
    """
    if not rotated:
        return heads
    order = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, heads.shape[1])])
    return heads[:, order]
