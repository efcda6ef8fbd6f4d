"""The command line as a user meets it: the real interpreter, a folder of one's own, and a model small enough to load at once."""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import gguf
import numpy as np
import pytest

from tokenizer.pieces import byte_alphabet

SCRIPT = pathlib.Path(__file__).parents[2] / "run_inference.py"
PATIENCE = 120.0  # seconds that anything may take on a loaded machine before the test gives up
CHARACTERS = [*map(chr, range(32, 127)), "\n"]  # one token each, so a prompt has as many tokens as characters
BYTES = [b"\xc3", b"\xa9", "é".encode()]  # the third is a merge of the others
SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCAB = len(CHARACTERS) + len(BYTES) + len(SPECIAL)  # 101


@dataclasses.dataclass(frozen=True)
class Run:
    """What a process left behind."""

    code: int
    out: str
    err: str


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The user's, but with the buffering that a user has."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | dict(changes)


class Session:
    """A running process whose output is read as it comes."""

    def __init__(self, command: Sequence[str], folder: pathlib.Path, env: Mapping[str, str], **streams: int):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        self._process = subprocess.Popen(command, cwd=folder, env=environment(env), **pipes)
        self._texts = {"out": bytearray(), "err": bytearray()}
        self._readers = []
        for name, pipe in (("out", self._process.stdout), ("err", self._process.stderr)):
            if pipe is not None:
                self._readers.append(threading.Thread(target=self._pump, args=(pipe.fileno(), self._texts[name]), daemon=True))
                self._readers[-1].start()

    def _pump(self, file: int, text: bytearray) -> None:
        while piece := os.read(file, 65536):
            text.extend(piece)

    @property
    def out(self) -> str:
        return self._texts["out"].decode(errors="replace")

    @property
    def err(self) -> str:
        return self._texts["err"].decode(errors="replace")

    def runs_for(self, seconds: float) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self._process.poll() is None, f"it ended before {what}\nstdout: {self.out}\nstderr: {self.err}"
            assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}\nstdout: {self.out}\nstderr: {self.err}"
            time.sleep(0.01)

    def end(self) -> Run:
        """Closes stdin and waits."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        code = self._process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return Run(code, self.out, self.err)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def run(command: Sequence[str], folder: pathlib.Path, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Run:
    done = subprocess.run(command, cwd=folder, env=environment(env or {}), input=stdin, capture_output=True, timeout=PATIENCE)
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="session")
def cli_in() -> Callable[..., Run]:
    """cli_in(folder, *args, stdin=b"", env={}): the command line's exit code, stdout and stderr, run in this folder."""
    return lambda folder, *args, **kwargs: run([sys.executable, str(SCRIPT), *args], folder, **kwargs)


class Warm:
    """Processes that have imported everything, one for each command at a time; see `warm.py`."""

    def __init__(self, folder: pathlib.Path, count: int):
        self._folder, self._idle = folder, queue.SimpleQueue()
        path = os.pathsep.join(filter(None, (str(SCRIPT.parent), os.environ.get("PYTHONPATH"))))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        command = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("warm.py"))]
        self._all = [subprocess.Popen(command, env=environment({"PYTHONPATH": path}), **pipes) for _ in range(count)]
        for process in self._all:
            self._idle.put(process)

    def __call__(self, folder: pathlib.Path, *args: str, stdin: bytes = b"") -> Run:
        process = self._idle.get()
        try:
            streams = [self._folder / f"{name}{process.pid}" for name in ("in", "out", "err")]
            for path, content in zip(streams, (stdin, b"", b""), strict=True):
                path.write_bytes(content)
            request = {"args": args, "folder": str(folder), "streams": [str(path) for path in streams]}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            return Run(code, *(path.read_text(encoding="utf-8") for path in streams[1:]))
        finally:
            self._idle.put(process)

    def stop(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def warm_cli_in(tmp_path_factory) -> Iterator[Warm]:
    """warm_cli_in(folder, *args, stdin=b""): as `cli_in`, in a tenth of the time, for what does not turn on how a process starts."""
    warm = Warm(tmp_path_factory.mktemp("streams"), os.cpu_count())
    yield warm
    warm.stop()


@pytest.fixture
def cli(cli_in, tmp_path) -> Callable[..., Run]:
    """cli(*args, stdin=b"", env={}): the same in `tmp_path`."""
    return lambda *args, **kwargs: cli_in(tmp_path, *args, **kwargs)


@pytest.fixture
def warm_cli(warm_cli_in, tmp_path) -> Callable[..., Run]:
    """warm_cli(*args, stdin=b""): `cli` likewise."""
    return lambda *args, **kwargs: warm_cli_in(tmp_path, *args, **kwargs)


@pytest.fixture
def shell(tmp_path) -> Callable[..., Run]:
    """shell(script, *args): a shell script in which `cli "$@"` is the command line with `args`."""
    function = 'cli() { "$python" "$script" "$@"; }\n'
    names = {"python": sys.executable, "script": str(SCRIPT)}
    return lambda script, *args: run(["sh", "-c", function + script, "sh", *args], tmp_path, env=names)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Session]]:
    """start(*args): the same, but it returns while the process runs."""
    with contextlib.ExitStack() as stack:

        def begin(*args: str, python: Sequence[str] = (), env: Mapping[str, str] | None = None, **streams: int) -> Session:
            session = Session([sys.executable, *python, str(SCRIPT), *args], tmp_path, env or {}, **streams)
            stack.callback(session.stop)
            return session

        yield begin


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model with a token per ASCII character and five more, and a context of 8,192."""

    path: str
    flag: str  # --model=path
    ascii_only: tuple[str, ...]  # flags for an answer of one character per token, without end
    accents_only: str  # a flag for one of "é" alone


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """A GGUF file: a random model of two layers with a ChatML template."""
    rng = np.random.default_rng(0)
    width, heads, kv_heads, head, hidden = 32, 4, 2, 8, 64
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = byte_alphabet()
    writer.add_token_list(["".join(alphabet[byte] for byte in text) for text in [*map(str.encode, CHARACTERS), *BYTES]] + SPECIAL)
    writer.add_token_types([1] * (VOCAB - 2) + [3] * 2)
    writer.add_token_merges([f"{alphabet[0xC3]} {alphabet[0xA9]}"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def add(name: str, *shape: int) -> None:
        value = np.ones(shape) if len(shape) == 1 else 0.3 * rng.normal(size=shape)
        writer.add_tensor(name, value.astype(np.float32))

    add("token_embd.weight", VOCAB, width)
    add("output.weight", VOCAB, width)
    add("output_norm.weight", width)
    for layer in range(2):
        for name, *shape in (
            ("attn_norm", width),
            ("attn_q", heads * head, width),
            ("attn_k", kv_heads * head, width),
            ("attn_v", kv_heads * head, width),
            ("attn_output", width, heads * head),
            ("ffn_norm", width),
            ("ffn_gate", hidden, width),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    banned = (f"--logit_bias={token}=-1000" for token in range(len(CHARACTERS), VOCAB))
    return Tiny(str(path), f"--model={path}", tuple(banned), f"--logit_bias={len(CHARACTERS) + 2}=1000")


@pytest.fixture(scope="session")
def assert_refused() -> Callable[..., None]:
    """assert_refused(run, *parts): a user error as promised, whose one line holds these parts."""

    def check(run: Run, *parts: str) -> None:
        assert "Traceback" not in run.err, run.err
        assert run.code == 2, run
        assert run.out == "", run
        lines = run.err.splitlines()
        assert len(lines) == 1 and re.match(r"error: \S", lines[0]), run.err
        for part in parts:
            assert part in lines[0], f"{part!r} is not in: {lines[0]}"

    return check
