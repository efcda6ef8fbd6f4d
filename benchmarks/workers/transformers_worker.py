"""Hugging Face transformers as a worker: weights dequantized from the same GGUF file, a static cache, greedy tokens read one by one.

Prefill is eager in any case; `compiled` puts `torch.compile` around the decode step.
"""

import inspect
import time

import dequantized
import torch
import transformers
from protocol import serve


class Transformers:
    def __init__(self, model, threads, dtype, compiled):
        torch.set_num_threads(threads)
        began = time.perf_counter()
        _, self.model = dequantized.load(model, dtype)
        self.info = {
            "load_seconds": time.perf_counter() - began,
            "vocab_size": self.model.config.vocab_size,
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }
        named = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # renamed in 5.x
        self._step = torch.compile(self._forward, dynamic=False) if compiled else self._forward
        self._key = self._cache = self._first = None

    def _forward(self, tokens, cache):
        out = self.model(tokens, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def _use(self, key, slots):
        """Makes a cache of just the slots that are needed (attention reads them all), unless the one at hand is for the same key."""
        if new := key != self._key:
            self._cache = None  # its memory goes first
            self._cache = transformers.StaticCache(config=self.model.config, max_cache_len=slots)
            self._key = key
        return new

    @torch.inference_mode()
    def prefill(self, tokens):
        if not self._use(("prefill", len(tokens)), len(tokens)):
            self._cache.crop(-len(tokens))
        began = time.perf_counter()
        first = self._forward(torch.tensor([tokens]), self._cache).tolist()
        return {"seconds": time.perf_counter() - began, "tokens": first[0]}

    @torch.inference_mode()
    def decode(self, tokens, batch, steps):
        if self._use(("decode", tuple(tokens), batch), len(tokens) + steps):
            self._first = self._forward(torch.tensor([tokens]).expand(batch, -1).contiguous(), self._cache)
        token, row = self._first.clone(), []
        began = time.perf_counter()
        for _ in range(steps):
            token = self._step(token, self._cache)
            row.append(token.tolist()[0][0])
        seconds = time.perf_counter() - began
        self._cache.crop(-steps)
        return {"seconds": seconds, "tokens": row}


if __name__ == "__main__":
    serve(Transformers)
