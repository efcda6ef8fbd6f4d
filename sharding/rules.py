"""Which mesh axis shards which logical axis: one table per strategy, each belonging to the mesh axis that it is for.

A mesh with several axes follows the tables of all of them. What no table names is whole on every device: norms, and what is small.
"""

from collections.abc import Iterable

from sharding import axes

Table = dict[str, str]  # logical axis -> mesh axis

DATA: Table = {
    axes.BATCH: "data",
    axes.PAGES: "data",  # every row's pages lie in its own shard's part of the pool
}
FSDP: Table = {
    axes.BATCH: "fsdp",
    axes.PAGES: "fsdp",
    axes.EMBED: "fsdp",
}
EXPERT: Table = {
    axes.EXPERTS: "expert",
}
CONTEXT: Table = {
    axes.TOKENS: "seq",
    axes.SLOTS: "seq",  # in turns: the token at position p is kept by shard p mod n, so that all shards hold alike
    axes.PAGE_SLOTS: "seq",
}
TENSOR: Table = {
    axes.KV_HEADS: "model",
    axes.HEADS: "model",
    axes.MLP: "model",
    axes.VOCAB: "model",
}

STRATEGIES: dict[str, Table] = {"data": DATA, "fsdp": FSDP, "expert": EXPERT, "seq": CONTEXT, "model": TENSOR}

EVERY = axes.SAMPLED  # split over all axes of a mesh: what follows the logits is otherwise done alike on every device

Rules = tuple[tuple[str, tuple[str, ...]], ...]  # logical axis -> mesh axes, outermost first


def rules_for(mesh_axes: Iterable[str]) -> Rules:
    """The tables of these mesh axes, in one."""
    joined: dict[str, tuple[str, ...]] = {EVERY: tuple(mesh_axes)}
    for name in joined[EVERY]:
        for logical, mesh_axis in STRATEGIES.get(name, {}).items():
            joined[logical] = (*joined.get(logical, ()), mesh_axis)
    return tuple(joined.items())
