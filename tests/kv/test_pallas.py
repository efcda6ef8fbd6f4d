"""Caches that Pallas kernels read: what they take, and what answers where the kernels do not."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from kernels import pallas_attention_tpu
from kv import AttentionSpec, KeyValue, Query, Step

BATCH, CAPACITY, SPEC = 3, 40, kv.LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64)


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[Any, ...] = (SPEC,) * 2


FORMAT = functools.partial(kv.Format.for_platform, "tpu", np.dtype(np.float32), interpret=True)


def answer(kernels: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(BATCH, 9, heads, 64)), jnp.float32) for heads in (4, 2, 2))
    cache = kv.init(Layers(), BATCH, CAPACITY, FORMAT(kernels=kernels))
    step = Step(rows=None, start=jnp.zeros(BATCH, jnp.int32), count=jnp.asarray([9, 0, 4]))
    with jax.default_matmul_precision("highest"):
        out, _ = cache.layer(1).attend(Query(q), KeyValue(k, v), step, AttentionSpec(scale=0.125))
    return np.asarray(out)


def test_a_call_whose_list_of_work_does_not_fit_is_answered_by_xla(monkeypatch):
    called = []
    attend = pallas_attention_tpu.attend_packed
    monkeypatch.setattr(pallas_attention_tpu, "attend_packed", lambda *args: called.append(args) or attend(*args))
    want = answer("xla")
    np.testing.assert_allclose(answer("pallas"), want, atol=1e-5)
    assert len(called) == 1
    monkeypatch.setattr(pallas_attention_tpu, "ITEMS", BATCH - 1)
    np.testing.assert_allclose(answer("pallas"), want, atol=1e-5)
    assert len(called) == 1


@pytest.mark.parametrize("width", [128, 64, 96])
def test_heads_by_themselves_take_no_more_bytes_than_their_numbers(width):
    layers = Layers((kv.LayerSpec(num_kv_heads=8, key_dim=width, value_dim=width),))
    format = FORMAT(kernels="pallas")
    cache = jax.eval_shape(lambda: kv.init(layers, BATCH, 64, format))
    arrays = jax.tree.leaves(cache.stores)
    assert sum(array.size * 4 for array in arrays) == BATCH * 64 * 2 * 8 * width * 4
    assert kv.nbytes(layers, BATCH, 64, format) == sum(array.size * 4 for array in jax.tree.leaves(cache))
    assert all(array.shape[2] == 1 and array.shape[4] % (8 * 128) == 0 for array in arrays)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"key_order": "KHS", "value_order": "KSH"}, "read floats in the orders 'SKH', not 'KHS' and 'KSH'"),
        ({"key_order": "SKH", "value_order": "SKH", "as_bits": True}, "of bits"),
    ],
)
def test_orders_that_the_kernels_do_not_read_are_refused(more, line):
    with pytest.raises(ValueError, match=line):
        kv.Format(kernels="pallas", **more)
