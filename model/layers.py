"""A layer: attention and MLP, each with its norms, added to the stream."""

from typing import Any

import jax
from flax import linen as nn

import kv
from kernels import Normed, plain
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

        def norm(wanted: bool, name: str, value: jax.Array) -> jax.Array | Normed:
            return RMSNorm(self.norm_eps, name=name)(value) if wanted else value

        inside, stream = norm(before, "attention_norm", x), step.queried(x)
        if isinstance(self.config.attention, MLAConfig):
            out, cache = MLA(self.config.attention, name="attention")(plain(inside), tables, step, cache)
            x = stream + plain(norm(after, "attention_post_norm", out))
        else:
            attention = Attention(self.config.attention, self.norm_eps, name="attention")
            out, cache = attention(inside, tables, step, cache, None if after else stream)
            x = stream + plain(norm(True, "attention_post_norm", out)) if after else out
        inside = norm(before, "mlp_norm", x)
        T = x.shape[1]
        rows = (None, None) if self.placement is None else step.axes(T, self.placement)
        if isinstance(self.config.mlp, MoEConfig):
            out = MoE(self.config.mlp, self.placement, name="mlp")(plain(inside), step.limit(T) >= 0, rows)
            x = x + plain(norm(after, "mlp_post_norm", out))
        else:
            out = MLP(self.config.mlp, name="mlp")(inside, None if after else x)
            x = x + plain(norm(True, "mlp_post_norm", out)) if after else out
        return (x if self.placement is None else self.placement.constrain(x, *rows)), cache
