"""The part of a layer that looks at one token at a time: a gated MLP, or a mixture of them."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels import experts, matmul
from model.config import MLPConfig, MoEConfig
from model.router import route
from model.weights import scaled_normal, weight
from sharding import axes


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
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
        D, F = x.shape[-1], self.config.hidden
        w_gate_up = weight(self, "w_gate_up", (2, F, D), (axes.GATE_UP, axes.MLP, axes.EMBED), scaled_normal(1))
        w_down = weight(self, "w_down", (D, F), (axes.EMBED, axes.MLP), scaled_normal(1))
        gate_up = matmul(x, w_gate_up)  # [B, T, 2, F]
        if self.config.bias:
            gate_up = gate_up + weight(self, "b_gate_up", (2, F), (axes.GATE_UP, axes.MLP), scaled_normal(0)).astype(x.dtype)
        out = matmul(activate(self.config, gate_up[..., 0, :], gate_up[..., 1, :]).astype(x.dtype), w_down)
        return out + weight(self, "b_down", (D,), (axes.EMBED,), scaled_normal(0)).astype(x.dtype) if self.config.bias else out


class MoE(nn.Module):
    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:  # x [B, T, D]; real bool [B, T], False for padding
        c = self.config
        B, T, D = x.shape
        E, F = c.router.num_experts, c.expert.hidden
        tokens = x.reshape(B * T, D)
        w_router = weight(self, "w_router", (E, D), (axes.EXPERTS, axes.EMBED), scaled_normal(1))
        w_gate_up = weight(self, "w_gate_up", (E, 2, F, D), (axes.EXPERTS, axes.GATE_UP, axes.MLP, axes.EMBED), scaled_normal(1))
        w_down = weight(self, "w_down", (E, D, F), (axes.EXPERTS, axes.EMBED, axes.MLP), scaled_normal(1))
        logits = matmul(tokens.astype(jnp.float32), w_router)  # f32 [B * T, E]: choices hang on small differences
        if c.router_bias:
            logits = logits + weight(self, "b_router", (E,), (axes.EXPERTS,), scaled_normal(0))
        bias = weight(self, "choice_bias", (E,), (axes.EXPERTS,), scaled_normal(0)) if c.router.choice_bias else None
        indices, shares = route(logits, c.router, bias)  # [B * T, k]
        b_in = b_out = None
        if c.expert.bias:
            b_in = weight(self, "b_gate_up", (E, 2, F), (axes.EXPERTS, axes.GATE_UP, axes.MLP), scaled_normal(0))
            b_out = weight(self, "b_down", (E, D), (axes.EXPERTS, axes.NORM), scaled_normal(0))
        indices = jnp.where(real.reshape(-1, 1), indices, -1)
        activation = functools.partial(activate, c.expert)
        out = experts(tokens, indices, shares, w_gate_up, w_down, activation, b_in, b_out).reshape(B, T, D)
        if c.shared is None:
            return out
        shared = MLP(c.shared, name="shared")(x)
        if c.shared_gate:
            gate = matmul(x, weight(self, "w_shared_gate", (1, D), (axes.ONE, axes.EMBED), scaled_normal(1)))
            shared = (nn.sigmoid(gate.astype(jnp.float32)) * shared.astype(jnp.float32)).astype(x.dtype)
        return out + shared
