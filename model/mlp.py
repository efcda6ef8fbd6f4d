"""The part of a layer that looks at one token at a time: a gated MLP, or a mixture of them."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels import Normed, experts, gated_matmul, matmul
from model.config import MLPConfig, MoEConfig
from model.router import route
from model.weights import packed_names, scaled_normal, weight
from sharding import Placement, axes, is_names


def activate(config: MLPConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes into the down projection, in f32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    match config.activation:
        case "silu":
            return nn.silu(gate) * up
        case "gelu_tanh":
            return nn.gelu(gate, approximate=True) * up
        case "clamped_swiglu":
            gate, up = jnp.minimum(gate, config.limit), jnp.clip(up, -config.limit, config.limit)
            return (up + 1) * gate * nn.sigmoid(config.alpha * gate)
    raise ValueError(f"activation {config.activation!r} is not known")


class MLP(nn.Module):
    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array | Normed, residual: jax.Array | None = None) -> jax.Array:
        """Args: x [B, T, D]; residual: likewise, added to the result. Returns: [B, T, D]."""
        D, F = x.shape[-1], self.config.hidden
        w_gate_up = weight(self, "w_gate_up", (2, F, D), (axes.GATE_UP, axes.MLP, axes.EMBED), scaled_normal(1))
        w_down = weight(self, "w_down", (D, F), (axes.EMBED, axes.MLP), scaled_normal(1))
        if not self.config.bias:
            hidden = gated_matmul(x, w_gate_up, self.config.activation, functools.partial(activate, self.config))
            return matmul(hidden, w_down, residual=residual)
        gate_up = matmul(x, w_gate_up) + weight(self, "b_gate_up", (2, F), (axes.GATE_UP, axes.MLP), scaled_normal(0)).astype(x.dtype)
        out = matmul(activate(self.config, gate_up[..., 0, :], gate_up[..., 1, :]).astype(x.dtype), w_down)
        out = out + weight(self, "b_down", (D,), (axes.EMBED,), scaled_normal(0)).astype(x.dtype)
        return out if residual is None else out + residual


class MoE(nn.Module):
    """
    Attributes:
      config: what the mixture is.
      placement: how it is split over a mesh; None: one device. Every device has some of the experts, or some hidden units of them, lets the
        tokens that it is given choose among all, and adds up what its own give; the sums are added over the devices.
    """

    config: MoEConfig
    placement: Placement | None = None

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array, rows: tuple[str | None, str | None] = (None, None)) -> jax.Array:
        """Args: x [B, T, D]; real bool [B, T], False for padding; rows: logical axes of B and T. Returns: [B, T, D]."""
        c, placement = self.config, self.placement
        D, E, F = x.shape[2], c.router.num_experts, c.expert.hidden
        named = {
            "router": ("w_router", (E, D), (axes.ROUTED, axes.EMBED), 1),
            "gate_up": ("w_gate_up", (E, 2, F, D), (axes.EXPERTS, axes.GATE_UP, axes.MLP, axes.EMBED), 1),
            "down": ("w_down", (E, D, F), (axes.EXPERTS, axes.EMBED, axes.MLP), 1),
        }
        if c.router_bias:
            named["router_bias"] = ("b_router", (E,), (axes.ROUTED,), 0)
        if c.router.choice_bias:
            named["choice_bias"] = ("choice_bias", (E,), (axes.ROUTED,), 0)
        if c.expert.bias:
            named["gate_up_bias"] = ("b_gate_up", (E, 2, F), (axes.EXPERTS, axes.GATE_UP, axes.MLP), 0)
            named["down_bias"] = ("b_down", (E, D), (axes.EXPERTS, axes.NORM), 0)
        weights = {key: weight(self, name, shape, names, scaled_normal(fan)) for key, (name, shape, names, fan) in named.items()}
        if placement is None:
            out = _mixed(c, x, real, weights)
        else:
            whole = {key: tuple(None if name == axes.EMBED else name for name in names) for key, (_, _, names, _) in named.items()}
            axes_of = {key: packed_names(weights[key], names) for key, names in whole.items()}
            split = jax.tree.map(placement.spec, axes_of, is_leaf=is_names)  # of what FSDP splits, all is gathered here
            stream, tokens = placement.spec((*rows, None)), placement.spec(rows)
            part = functools.partial(_own_experts, c, placement)
            out = placement.shard_map(part, in_specs=(stream, tokens, split), out_specs=stream)(x, real, weights)
        if c.shared is None:
            return out
        shared = MLP(c.shared, name="shared")(x)
        if c.shared_gate:
            gate = matmul(x, weight(self, "w_shared_gate", (1, D), (axes.ONE, axes.EMBED), scaled_normal(1)))
            shared = (nn.sigmoid(gate.astype(jnp.float32)) * shared.astype(jnp.float32)).astype(x.dtype)
        return out + shared


def _mixed(c: MoEConfig, x: jax.Array, real: jax.Array, weights: dict[str, jax.Array], first: jax.Array | int = 0) -> jax.Array:
    """[B, T, D], of the experts from number `first` on that there are weights of."""
    B, T, D = x.shape
    tokens = x.reshape(B * T, D)
    logits = matmul(tokens.astype(jnp.float32), weights["router"])  # f32 [B * T, E]: choices hang on small differences
    if c.router_bias:
        logits = logits + weights["router_bias"]
    indices, shares = route(logits, c.router, weights.get("choice_bias"))  # [B * T, k]
    indices = jnp.where(real.reshape(-1, 1), indices - first, -1)
    activation = functools.partial(activate, c.expert)
    biases = weights.get("gate_up_bias"), weights.get("down_bias")
    out = experts(tokens, indices, shares, weights["gate_up"], weights["down"], activation, *biases, gate=c.expert.activation)
    return out.reshape(B, T, D)


def _own_experts(c: MoEConfig, placement: Placement, x: jax.Array, real: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Inside `shard_map`: `_mixed`, with the experts and hidden units of all devices."""
    if c.expert.bias:  # of those that share an expert's hidden units, one adds it
        weights = weights | {"down_bias": jnp.where(placement.index(axes.MLP) == 0, weights["down_bias"], 0)}
    out = _mixed(c, x, real, weights, placement.index(axes.EXPERTS) * len(weights["gate_up"]))
    spread = (*placement.mesh_axes(axes.EXPERTS), *placement.mesh_axes(axes.MLP))
    return jax.lax.psum(out, spread) if spread else out
