"""llama.cpp as a worker, through the C API in llama-cpp-python: the same GGUF file as it is, or widened to f32; keys and values in
f16 or q8_0.

A batch is as many sequences of one context, each with cache cells of its own.
"""

import ctypes
import os
import tempfile
import time

import llama_cpp as L
import numpy as np
from protocol import serve

F32 = 0  # llama_ftype: all tensors f32
CACHES = {"f16": 1, "q8_0": 8}  # ggml_type


class LlamaCpp:
    def __init__(self, model, threads, flash_attention, widened, cache):
        self._quiet = L.llama_log_callback(lambda *_: None)  # held here: the library keeps only its address
        L.llama_log_set(self._quiet, None)
        L.llama_backend_init()
        with tempfile.TemporaryDirectory() as scratch:
            if widened:
                model = _widen(model, os.path.join(scratch, "f32.gguf"), threads)
            began = time.perf_counter()
            params = L.llama_model_default_params()
            params.n_gpu_layers = 0
            self.model = L.llama_model_load_from_file(model.encode(), params)
            if not self.model:
                raise RuntimeError(f"llama.cpp can't load {model}")
            seconds = time.perf_counter() - began
        self.threads, self.flash_attention, self.cache = threads, flash_attention, CACHES[cache]
        self.vocab_size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.info = {"load_seconds": seconds, "vocab_size": self.vocab_size, "versions": {"llama-cpp-python": L.__version__}}
        self._key = self._context = self._memory = self._batch = self._first = None

    def _use(self, key, rows, slots):
        """Makes a context of `rows` sequences, `slots` tokens each, unless the one at hand is for the same key."""
        if key == self._key:
            return False
        if self._context:
            L.llama_batch_free(self._batch)
            L.llama_free(self._context)
        params = L.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = rows * (-(-slots // 256) * 256), rows, False
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.cache
        params.flash_attn_type = int(self.flash_attention)
        params.no_perf = True
        self._context = L.llama_init_from_model(self.model, params)
        if not self._context:
            self._key = None
            raise RuntimeError(f"llama.cpp can't make a context of {rows} sequences of {slots} tokens")
        self._memory = L.llama_get_memory(self._context)
        self._batch = L.llama_batch_init(rows, 0, 1)
        self._key = key
        return True

    def _run(self, batch):
        if code := L.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _likeliest(self, index):
        return int(np.ctypeslib.as_array(L.llama_get_logits_ith(self._context, index), shape=(self.vocab_size,)).argmax())

    def _fill(self, tokens):
        """Sequence 0 reads the prompt, in calls of the context's batch size; returns the first new token."""
        most = L.llama_n_batch(self._context)
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            array = (L.llama_token * len(part))(*part)  # by name: the batch holds its address alone
            self._run(L.llama_batch_get_one(array, len(part)))
        return self._likeliest(-1)

    def _decode_step(self, tokens, position):
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, 1
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, row
        self._run(batch)
        return [self._likeliest(row) for row in range(len(tokens))]

    def prefill(self, tokens):
        self._use(("prefill", len(tokens)), 1, len(tokens))
        L.llama_memory_clear(self._memory, False)
        began = time.perf_counter()
        first = self._fill(tokens)
        return {"seconds": time.perf_counter() - began, "tokens": [first]}

    def decode(self, tokens, batch, steps):
        held = len(tokens)
        if self._use(("decode", tuple(tokens), batch), batch, held + steps):
            self._first = self._fill(tokens)
            for row in range(1, batch):
                L.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        last, row_0 = [self._first] * batch, []
        began = time.perf_counter()
        for step in range(steps):
            last = self._decode_step(last, held + step)
            row_0.append(last[0])
        seconds = time.perf_counter() - began
        for row in range(batch):
            L.llama_memory_seq_rm(self._memory, row, held, -1)
        return {"seconds": seconds, "tokens": row_0}


def _widen(source, target, threads):
    """Writes `source` with all its tensors as f32; returns `target`."""
    params = L.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = F32, True, threads
    if code := L.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize returned {code}")
    return target


if __name__ == "__main__":
    serve(LlamaCpp)
