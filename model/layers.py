"""A layer: attention and MLP, each with its norms, added to the stream."""

from typing import Any

import jax
from flax import linen as nn

import kv
from model.attention import Attention
from model.config import LayerConfig, MLAConfig, MoEConfig
from model.mla import MLA
from model.mlp import MLP, MoE
from model.norm import RMSNorm
from sharding import Placement


class Block(nn.Module):
    """
    Attributes:
      config: what the layer is.
      norm_eps: the model's.
      placement: how it is split over a mesh; None: one device.
    """

    config: LayerConfig
    norm_eps: float
    placement: Placement | None = None

    @nn.compact
    def __call__(self, x: jax.Array, tables: Any, step: kv.Step, cache: Any) -> tuple[jax.Array, Any]:
        """Args: x [B, T, D]; tables: of this layer's rotations. Returns: [B, T, D] (or [B, 1, D] with `step.last_only`), new cache."""
        before, after = self.config.norms in ("pre", "sandwich"), self.config.norms in ("post", "sandwich")

        def norm(wanted: bool, name: str, value: jax.Array) -> jax.Array:
            return RMSNorm(self.norm_eps, name=name)(value) if wanted else value

        if isinstance(self.config.attention, MLAConfig):
            attention = MLA(self.config.attention, name="attention")
        else:
            attention = Attention(self.config.attention, self.norm_eps, name="attention")
        out, cache = attention(norm(before, "attention_norm", x), tables, step, cache)
        x = step.queried(x) + norm(after, "attention_post_norm", out)
        inside = norm(before, "mlp_norm", x)
        T = x.shape[1]
        rows = (None, None) if self.placement is None else step.axes(T, self.placement)
        if isinstance(self.config.mlp, MoEConfig):
            out = MoE(self.config.mlp, self.placement, name="mlp")(inside, step.limit(T) >= 0, rows)
        else:
            out = MLP(self.config.mlp, name="mlp")(inside)
        x = x + norm(after, "mlp_post_norm", out)
        return (x if self.placement is None else self.placement.constrain(x, *rows)), cache
