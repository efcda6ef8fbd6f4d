"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, called with made-up shapes; `fuzz.h` says how to add some."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels/cpu"
COMPILER = shutil.which("g++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-w", f"-I{KERNELS}", f"-I{HERE}", *SANITIZE]
OPTIONS = {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1"}
BROKEN = "matmul_avx2"
CASES = 2000  # with each instruction set

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the kernels are for x86-64 Linux"),
]


def run(*command: object, seconds: int = 600) -> str:
    done = subprocess.run([str(part) for part in command], env=os.environ | OPTIONS, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:6000] + done.stderr[-1000:]
    return done.stdout


def compiled(sources: list[Path], folder: Path) -> list[Path]:
    objects = [folder / f"{source.stem}_{source.parent.name}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(COMPILER, *FLAGS, "-c", source, "-o", made), sources, objects))
    return objects


def linked(objects: list[Path], program: Path) -> Path:
    run(COMPILER, *SANITIZE, *objects, "-o", program)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[Path]:
    kernels = [source for source in KERNELS.glob("*.cc") if source.name != "module.cc"]  # which is XLA's and Python's side
    return compiled([*HERE.glob("*.cc"), *kernels], tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("operation", ["matmul", "attention"])
def test_no_call_reads_or_writes_what_is_not_its_own(objects, tmp_path, operation):
    made = run(linked(objects, tmp_path / "fuzz"), 1, CASES, operation).split()
    assert made[0] == f"{operation}:" and int(made[1]) in (CASES, 2 * CASES)  # a CPU may lack AVX-512


def test_a_store_past_the_end_is_found_and_named(objects, tmp_path):
    """The harness itself, with kernels that write whole vectors where fewer numbers are left."""
    for source in KERNELS.glob("*.*"):
        shutil.copy(source, tmp_path)
    header = tmp_path / "avx2.h"
    text = header.read_text(encoding="utf-8")
    broken = text.replace("std::memcpy(p, whole, count * sizeof(float));", "std::memcpy(p, whole, sizeof whole);", 1)
    assert broken != text
    header.write_text(broken, encoding="utf-8")
    others = [each for each in objects if not each.name.startswith(BROKEN)]
    program = linked([*others, *compiled([tmp_path / f"{BROKEN}.cc"], tmp_path)], tmp_path / "fuzz")
    with pytest.raises(AssertionError, match=r"(?s)heap-buffer-overflow.*in matmul, seed \d+, avx2: "):
        run(program, 1, CASES, "matmul")
