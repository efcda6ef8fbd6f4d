"""Decode steps over a cache that is said to hold any number of tokens, without their prefill."""

import jax
import jax.numpy as jnp
import numpy as np

import kv
import sampling
from benchmarks.rounds import seconds
from sampling import DecodeState, LanguageModel, SamplingOptions, SamplingParams
from sampling.loop import RUNNING


class Decoding:
    """Rows that decode greedily, `steps` tokens per dispatch, over slots with random contents: what a step costs depends on how many
    slots it reads and not on what they hold.
    """

    def __init__(self, lm: LanguageModel, format: kv.Format, batch: int, capacity: int, steps: int):
        self.lm, self.steps, self.batch = lm, steps, batch
        self.cache = filled(with_pages(lm, format, batch, capacity))
        self.state = DecodeState.init(batch, lm.config.vocab_size)
        self.sampling = jax.device_put(SamplingParams.stack([SamplingOptions(seed=0)] * batch, ()))  # no token ends a row

    def __call__(self, held: int, dispatches: int = 1) -> float:
        """Seconds per step, over the given number of dispatches, the first of which finds `held` tokens in every row.

        Raises:
          RuntimeError: a row did not run all its steps, so that the time is no step's.
        """
        every = (self.batch,)
        self.cache = self.cache.replace(lengths=jnp.full(every, held, jnp.int32))
        self.state = self.state.replace(finish=jnp.full(every, RUNNING, jnp.int32), remaining=jnp.full(every, 2**31 - 1, jnp.int32))
        jax.block_until_ready((self.cache, self.state))
        took = seconds(lambda: [self._dispatch() for _ in range(dispatches)])
        if (reached := np.asarray(self.cache.lengths)).tolist() != [held + dispatches * self.steps] * self.batch:
            raise RuntimeError(f"rows hold {reached.tolist()} tokens after {dispatches} x {self.steps} steps from {held}: some did not run")
        return took / (dispatches * self.steps)

    def mean_held(self, held: int) -> float:
        """Tokens that a step of one dispatch reads, its own included: the mean over the steps."""
        return held + (self.steps + 1) / 2

    def _dispatch(self) -> jax.Array:
        sampled, self.state, self.cache = sampling.decode(
            self.lm.model, self.lm.params, self.cache, self.state, self.sampling, steps=self.steps
        )
        return sampled.tokens


def with_pages(lm: LanguageModel, format: kv.Format, batch: int, capacity: int) -> kv.Cache:
    """A cache whose rows, if it is paged, have all the pages that they can have, those of the rows in turn."""
    groups = kv.page_groups(lm.config, capacity, format)
    pages = None if format.page_size is None else [batch * -(-capacity // format.page_size)] * len(groups)
    cache = kv.init(lm.config, batch, capacity, format, pages)
    tables = tuple(jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape[::-1]).T for table in cache.tables)
    return cache.replace(tables=tables)


def filled(cache: kv.Cache) -> kv.Cache:
    """The cache with random contents: no zeros, denormals or nans, which processors may treat in ways of their own."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 1.5, 1 << 16).astype(np.float32)

    def fill(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.uint16:  # the bits of bf16, or of f16: numbers near 1 either way
            block = values.astype(jnp.bfloat16).view(np.uint16)
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            block = values.astype(leaf.dtype)
        elif jnp.dtype(leaf.dtype).itemsize == 1:
            block = rng.integers(48, 64, values.size).astype(leaf.dtype)
        else:  # numbers of pages or slots are no contents
            return leaf
        return jnp.array(np.resize(block, leaf.shape))

    return cache.replace(stores=jax.tree.map(fill, cache.stores))
