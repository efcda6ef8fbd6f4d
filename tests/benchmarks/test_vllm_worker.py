"""vLLM's worker with an engine that only pretends: what it asks of it, and what it counts."""

import importlib
import sys
import types

import pytest

from benchmarks import stacks

CLOCK_STEP = 1.0  # seconds of an engine's step


class Engine:
    """Reads prompts in the order given, `budget` tokens a step with those that ready rows write: 100, 101, ... in each."""

    def __init__(self, budget, rows=8, pages=100, page=4, drop_at=None):
        self.budget, self.drop_at, self.steps = budget, drop_at, 0
        self.left, self.written, self.most = {}, {}, {}
        self.options, self.aborted = [], []
        self.vllm_config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=budget, max_num_seqs=rows),
            cache_config=types.SimpleNamespace(num_gpu_blocks=pages, block_size=page),
            model_config=types.SimpleNamespace(get_vocab_size=lambda: 7),
        )

    def add_request(self, name, prompt, options):
        self.options.append(options)
        self.left[name], self.written[name], self.most[name] = len(prompt["prompt_token_ids"]), [], options["max_tokens"]

    def step(self):
        self.steps += 1
        budget = self.budget - sum(left == 0 for left in self.left.values())
        outputs = []
        for name in list(self.left):
            if self.left[name]:
                part = min(self.left[name], budget)
                self.left[name], budget = self.left[name] - part, budget - part
            if self.left[name] == 0 and self.steps != self.drop_at:
                self.written[name].append(100 + len(self.written[name]))
                outputs.append(types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=self.written[name])]))
                if len(self.written[name]) == self.most[name]:
                    del self.left[name]
        return outputs

    def abort_request(self, names):
        self.aborted.append(names)
        for name in names:
            self.left.pop(name, None)


@pytest.fixture
def start(monkeypatch):
    """Makes a worker over the given engine, with neither vLLM nor torch: `converted` are the commands that would have converted."""
    converted, asked = [], {}

    def make(engine, code=0, stderr="", **settings):
        def llm(**options):
            asked.update(options)
            return types.SimpleNamespace(llm_engine=engine)

        def run(command, **_):
            converted.append(command)
            return types.SimpleNamespace(returncode=code, stderr=stderr)

        inputs = types.SimpleNamespace(tokens_input=lambda tokens: {"prompt_token_ids": tokens})
        fakes = {
            "vllm": types.SimpleNamespace(__version__="1", LLM=llm, SamplingParams=dict, inputs=inputs),
            "torch": types.SimpleNamespace(__version__="2", float32="float32", bfloat16="bfloat16", set_num_threads=lambda _: None),
            "transformers": types.SimpleNamespace(__version__="3"),
        }
        for name, module in fakes.items():
            monkeypatch.setitem(sys.modules, name, module)
        for name in ("protocol", "dequantized", "vllm_worker"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(stacks.WORKERS))
        worker = importlib.import_module("vllm_worker")
        for name in worker.ENVIRONMENT:
            monkeypatch.setenv(name, "")
        monkeypatch.setattr(worker, "subprocess", types.SimpleNamespace(run=run))
        monkeypatch.setattr(worker, "time", types.SimpleNamespace(perf_counter=lambda: engine.steps * CLOCK_STEP))
        return worker.Vllm("tiny.gguf", 2, **{"dtype": "bf16", "compiled": False, **settings})

    yield types.SimpleNamespace(make=make, asked=asked, converted=converted)
    for name in ("protocol", "dequantized", "vllm_worker"):
        sys.modules.pop(name, None)


def test_prefill_takes_all_steps_up_to_the_first_token(start):
    engine = Engine(budget=4)
    worker = start.make(engine)
    assert worker.prefill([1] * 10) == {"seconds": 3 * CLOCK_STEP, "tokens": [100]}
    assert worker.prefill([1] * 4) == {"seconds": CLOCK_STEP, "tokens": [100]}
    assert engine.options[0] == {"temperature": 0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}


def test_decode_times_its_steps_alone_and_starts_after_the_first_token(start):
    engine = Engine(budget=32)
    worker = start.make(engine)
    for _ in range(2):
        assert worker.decode([1] * 8, batch=3, steps=5) == {"seconds": 5 * CLOCK_STEP, "tokens": [101, 102, 103, 104, 105]}
    assert engine.steps == 2 * (1 + 5)
    assert engine.left == {}
    assert engine.aborted == [["0", "1", "2"], ["3", "4", "5"]]


def test_rows_that_are_read_in_several_steps_are_all_served_in_every_timed_step(start):
    engine = Engine(budget=10)
    worker = start.make(engine)
    assert worker.decode([1] * 8, batch=4, steps=3) == {"seconds": 3 * CLOCK_STEP, "tokens": [101, 102, 103]}
    assert engine.steps > 4  # at least one to read each row, besides the timed ones


def test_a_row_that_misses_a_step_is_an_error_and_leaves_nothing_behind(start):
    engine = Engine(budget=32, drop_at=3)
    worker = start.make(engine)
    with pytest.raises(RuntimeError, match="a step gave 0 of 2 rows a token"):
        worker.decode([1] * 8, batch=2, steps=4)
    assert engine.left == {}


@pytest.mark.parametrize(("batch", "held"), [(9, 1), (2, 200)])
def test_a_batch_that_vllm_does_not_hold_at_once_is_an_error_before_it_is_read(start, batch, held):
    engine = Engine(budget=1000)
    with pytest.raises(ValueError, match=f"{batch} rows of {held} tokens, .* pages, are not held at once: vLLM holds 8 rows, 99 pages"):
        start.make(engine).decode([1] * held, batch=batch, steps=2)
    assert engine.steps == 0


@pytest.mark.parametrize(("pages", "fits"), [(7, True), (6, False)])
def test_pages_are_counted_to_the_last_one(start, pages, fits):
    worker = start.make(Engine(budget=1000, pages=pages, page=4))  # the engine keeps one for itself
    prompt = [1] * 5  # and the first token, and two steps: two pages in each of three rows
    if fits:
        assert worker.decode(prompt, batch=3, steps=2)["tokens"] == [101, 102]
    else:
        with pytest.raises(ValueError, match="3 rows of 5 tokens, 6 pages, are not held at once: vLLM holds 8 rows, 5 pages"):
            worker.decode(prompt, batch=3, steps=2)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_engine_is_made_of_the_converted_folder_without_a_prefix_cache(start, compiled):
    worker = start.make(Engine(budget=8), compiled=compiled)
    (command,) = start.converted
    assert command[0] == sys.executable and command[2:4] == ["tiny.gguf", "bf16"]
    assert start.asked["model"] == command[4]
    assert start.asked["enforce_eager"] is not compiled
    assert start.asked["enable_prefix_caching"] is False
    assert start.asked["dtype"] == "bfloat16"
    assert worker.info == {"load_seconds": 0.0, "vocab_size": 7, "versions": {"vllm": "1", "torch": "2", "transformers": "3"}}


def test_a_file_that_transformers_can_not_read_is_an_error_with_its_last_words(start):
    with pytest.raises(RuntimeError, match=r"transformers can't convert tiny.gguf: ValueError: no such architecture"):
        start.make(Engine(budget=8), code=1, stderr="Traceback\nValueError: no such architecture\n")
