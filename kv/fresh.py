"""The kind that stores nothing: the full forward is the model over `Fresh`, and the laws compare every cache with it."""

from typing import Any

import jax
from flax import struct

from kernels import attention
from kv.latent import latent_attention
from kv.types import AttentionSpec, KeyValue, LatentQuery, LatentRow, Query, Step


class Fresh(struct.PyTreeNode):
    """Attention among the call's own tokens, all scores at once: memory grows with T squared."""

    layer: jax.Array | int | None = None

    def attend(
        self, query: Query | LatentQuery, new: KeyValue | LatentRow, step: Step, spec: AttentionSpec, weights: Any = None
    ) -> tuple[jax.Array, "Fresh"]:
        """Same contract as `Layer.attend`; `step.start` must be 0 and `new` must be given, since nothing is held."""
        limit = step.limit(jax.tree.leaves(query)[0].shape[1])
        if isinstance(query, LatentQuery):
            return latent_attention(query, new, limit, spec, weights), self
        return attention(query.q, new.k, new.v, limit, spec.scoring(weights)), self

    def logical_axes(self, shared: bool) -> "Fresh":
        return self
