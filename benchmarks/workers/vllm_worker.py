"""vLLM's CPU build as a worker: weights dequantized from the same GGUF file, the engine in this process, its steps called one by one.

Every call reads its prompts anew, and nothing of another's: there is no prefix cache. decode: the steps after the one that gave the last
row its first token; each gives every row one token, read by the host. Prompts of a batch that do not fit in one step of the engine
(`max_num_batched_tokens`) are read in several, in which the rows that are ready go on, so that those hold a few tokens more.
`compiled` is vLLM's default, which compiles while it loads.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time

import dequantized
import torch
import transformers
import vllm
from protocol import serve

KV_BYTES = 1 << 30
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a process more would take time from the threads that compute
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, where the system puts them
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm:
    def __init__(self, model, threads, dtype, compiled):
        os.environ.update(ENVIRONMENT)
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            _convert(model, dtype, folder)
            began = time.perf_counter()
            self._engine = vllm.LLM(
                model=folder,
                dtype=dequantized.DTYPES[dtype],
                enforce_eager=not compiled,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=KV_BYTES,
            ).llm_engine
            seconds = time.perf_counter() - began
        config = self._engine.vllm_config
        self._step_tokens, self._rows = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
        self._pages, self._page = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        self._names = map(str, itertools.count())
        self.info = {
            "load_seconds": seconds,
            "vocab_size": config.model_config.get_vocab_size(),
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        }

    def _add(self, tokens, most):
        """Queues a row of at most `most` new tokens; returns its name."""
        name = next(self._names)
        options = vllm.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, vllm.inputs.tokens_input(tokens), options)
        return name

    def _step(self):
        """All new tokens, so far, of each row that was given one."""
        return {output.request_id: list(output.outputs[0].token_ids) for output in self._engine.step()}

    def prefill(self, tokens):
        began = time.perf_counter()
        name = self._add(tokens, 1)
        while not (given := self._step()):  # a prompt may take several steps
            pass
        return {"seconds": time.perf_counter() - began, "tokens": given[name]}

    def decode(self, tokens, batch, steps):
        reading = batch * len(tokens) // max(1, self._step_tokens - batch) + 1  # steps at most, while a row that is ready goes on
        most = reading + steps
        pages = batch * -(-(len(tokens) + most) // self._page)
        if batch > self._rows or pages >= self._pages:  # some would wait for others to end
            limits = f"vLLM holds {self._rows} rows, {self._pages - 1} pages"
            raise ValueError(f"{batch} rows of {len(tokens)} tokens, {pages} pages, are not held at once: {limits}")
        names = [self._add(tokens, most) for _ in range(batch)]
        try:
            given = {}
            while len(given) < batch:
                given.update(self._step())
            served = set()
            began = time.perf_counter()
            for _ in range(steps):
                given = self._step()
                served.add(len(given))
            seconds = time.perf_counter() - began
        finally:
            self._engine.abort_request(names)
        if served != {batch}:
            raise RuntimeError(f"a step gave {min(served)} of {batch} rows a token")
        return {"seconds": seconds, "tokens": given[names[0]][1 : steps + 1]}


def _convert(model, dtype, folder):
    """Writes the Hugging Face folder, in a process of its own, whose memory is not this one's."""
    done = subprocess.run([sys.executable, dequantized.__file__, model, dtype, folder], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"transformers can't convert {model}: {done.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    serve(Vllm)
