"""This stack as a worker: the calls that `sampling.generate` makes, with the next dispatch in flight while tokens are read."""

import time

import jax
import jaxlib
import numpy as np
from flax import linen as nn
from protocol import serve

import kv
import runtime
import sampling
from model import abstract_params
from sampling.batch import STEPS, Batch, plan_capacity

OPTIONS = sampling.SamplingOptions(ignore_eos=True, max_new_tokens=2**31 - 1)


class Diptych:
    def __init__(self, model, threads, formats):
        del threads  # XLA took them from NPROC, when JAX started
        runtime.enable_compilation_cache()
        self.lm = sampling.load(model, **formats)
        self.info = {
            "load_seconds": self.lm.load_seconds,
            "vocab_size": self.lm.config.vocab_size,
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
            "work": self._work(),
        }
        self._key = None  # what the batch below was made and filled for
        self._batch = self._first = None

    def _work(self):
        """What `benchmarks.limits.Work` needs to know of the model."""
        config = self.lm.config
        params = nn.meta.unbox(abstract_params(config))
        embedding = params["embedding"].size
        head = embedding if config.tie_embeddings else params["head"].size
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        attention = [layer.attention for layer in config.layers]
        return {
            "body_weights": total - embedding - (0 if config.tie_embeddings else head),
            "head_weights": head,
            "weight_bytes": self.lm.weight_bytes,
            "kv_bytes": kv.bytes_per_token(config, self.lm.kv_format),
            "attention_flops": sum(4 * a.num_heads * a.head_dim for a in attention),
        }

    def _use(self, key, size, slots):
        """Makes a batch, unless the one at hand is for the same key. Returns whether it is new."""
        if new := key != self._key:
            self._batch = None  # its memory goes first
            self._batch = Batch(self.lm, size, plan_capacity(slots, self.lm.config.context_length))
            self._key = key
        return new

    def prefill(self, tokens):
        self._use(("prefill", len(tokens)), 1, len(tokens) + STEPS)
        began = time.perf_counter()
        sampled = self._batch.start(0, tokens, OPTIONS)
        return {"seconds": time.perf_counter() - began, "tokens": sampled.tokens[0].tolist()}

    def decode(self, tokens, batch, steps):
        if steps % STEPS:
            raise ValueError(f"{steps} steps are not a multiple of {STEPS}, the tokens of a dispatch")
        if self._use(("decode", tuple(tokens), batch), batch, len(tokens) + steps):
            for row in range(batch):
                self._batch.start(row, tokens, OPTIONS)
            self._first = np.array(self._batch.state.tokens)  # a copy: the state is donated
        running = self._batch
        running.cache = running.cache.rewind(np.full((batch,), len(tokens), np.int32))
        running.state = running.state.replace(tokens=jax.numpy.array(self._first))
        jax.block_until_ready((running.cache, running.state))
        began = time.perf_counter()
        running.dispatch()
        read = []
        for _ in range(steps // STEPS - 1):
            running.dispatch()
            read.append(running.read())
        read.append(running.read())
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": np.concatenate([sampled.tokens[:, 0] for sampled in read]).tolist()}


if __name__ == "__main__":
    serve(Diptych)
