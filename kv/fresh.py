"""The kind that stores nothing: the full forward is the model over `Fresh`, and the laws compare every cache with it."""

import jax
from flax import struct

from kernels import attention, index_scores, top_slots
from kv.types import AttentionSpec, KeyValue, Query, Step


class Fresh(struct.PyTreeNode):
    """Attention among the call's own tokens, all scores at once: memory grows with T squared."""

    layer: jax.Array | int | None = None

    def attend(
        self, query: Query, new: KeyValue, step: Step, spec: AttentionSpec, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, "Fresh"]:
        """Same contract as `Dense.attend`; `step.start` must be 0 and `new` must be given, since nothing is held."""
        limit, allowed = step.limit(query.q.shape[1]), None
        if spec.top_k is not None:
            allowed = top_slots(index_scores(query.index_q, query.index_w, new.index_k[:, :, 0]), limit, spec.top_k)
        return attention(query.q, new.k, new.v, limit, spec.scoring(sinks, allowed)), self

    def logical_axes(self) -> "Fresh":
        return self
