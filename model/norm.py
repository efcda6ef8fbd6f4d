"""Norms, in f32 whatever the activations are."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels import Normed
from model.weights import weight
from sharding import axes


class RMSNorm(nn.Module):
    """`kernels.rms_norm` with a scale of its own, left to who reads it. Checkpoints that store scales as distances from 1 have the 1 added
    at loading."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> Normed:  # [..., D]
        return Normed(x, weight(self, "scale", (x.shape[-1],), (axes.NORM,), nn.initializers.ones), self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016, arXiv 1607.06450)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D]
        scale = weight(self, "scale", (x.shape[-1],), (axes.NORM,), nn.initializers.ones)
        bias = weight(self, "bias", (x.shape[-1],), (axes.NORM,), nn.initializers.zeros)
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale + bias).astype(x.dtype)
