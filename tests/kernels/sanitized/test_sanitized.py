"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, called with made-up shapes (`fuzz.h` says how to add some), and
their threads under ThreadSanitizer."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib
import pytest

from kernels import cpu

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KERNELS = ROOT / "kernels/cpu"
COMPILER = shutil.which("g++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-w", f"-I{KERNELS}", f"-I{HERE}", *SANITIZE]
OPTIONS = {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1"}
BROKEN = "lowered_avx2"
CASES = 600  # with each instruction set

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no g++"),
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the kernels are for x86-64 Linux"),
]


def run(*command: object, cwd: Path | None = None, **more: str) -> str:
    environment = os.environ | OPTIONS | more
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:6000] + done.stderr[-1000:]
    return done.stdout


def compiled(sources: list[Path], folder: Path, *flags: str) -> list[Path]:
    objects = [folder / f"{source.stem}_{source.parent.name}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(COMPILER, *FLAGS, *flags, "-c", source, "-o", made), sources, objects))
    return objects


def linked(objects: list[Path], program: Path, *flags: str) -> Path:
    run(COMPILER, *SANITIZE, *flags, *objects, "-o", program)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[Path]:
    kernels = KERNELS.glob("lowered_*.cc")  # the others are XLA's and Python's side
    return compiled([*HERE.glob("*.cc"), *kernels], tmp_path_factory.mktemp("fuzz"), "-fPIC")


@pytest.mark.parametrize("operation", ["matmul", "attention"])
def test_no_call_reads_or_writes_what_is_not_its_own(objects, tmp_path, operation):
    made = run(linked(objects, tmp_path / "fuzz"), 1, CASES, operation).split()
    assert made[0] == f"{operation}:" and int(made[1]) in (CASES, 2 * CASES)  # a CPU may lack AVX-512


def test_threads_share_operations_without_a_race(tmp_path):
    program = tmp_path / "team"
    run(COMPILER, "-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{KERNELS}", HERE / "threads/team.cc", "-o", program, "-pthread")
    told = run(program, 5000, TSAN_OPTIONS="halt_on_error=1").split()
    cores = len(os.sched_getaffinity(0))
    assert told[:2] == ["10000", "calls,"] and (int(told[2]) > 1 or cores == 1)


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


@pytest.mark.skipif(cpu.native is None, reason="the native kernels are not built")
def test_calls_that_come_through_jax_stay_within_their_own_too(objects, tmp_path):
    """The tests of native kernels, with a module of their own that is sanitized: XLA's and Python's side of it, and threads."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    headers = ["-fPIC", "-isystem", f"{Path(jaxlib.__file__).parent}/include", f"-I{sysconfig.get_path('include')}"]
    lowered = [each for each in objects if each.name.startswith("lowered_")]
    others = compiled([source for source in KERNELS.glob("*.cc") if not source.name.startswith("lowered_")], tmp_path, *headers)
    linked([*lowered, *others], tmp_path / "kernels/cpu/native.abi3.so", "-shared")
    tests = HERE.parent.glob("test_native_*.py")
    options = ["-q", "-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    told = {
        "LD_PRELOAD": " ".join(run(COMPILER, f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=0",  # the interpreter's own
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "JAX_PLATFORMS": "cpu",
    }
    where = run(sys.executable, "-c", "from kernels import cpu; print(cpu.native.__file__)", cwd=tmp_path, **told)
    assert where.strip() == str(tmp_path / "kernels/cpu/native.abi3.so")
    left_out = "not eight_devices and not any_course and not products_are and not avx2"  # the fuzz above goes through both instruction sets
    listed = run(sys.executable, "-m", "pytest", *options, "--collect-only", "-k", left_out, *tests, cwd=tmp_path, **told)
    cases: dict[str, list[str]] = {}
    for name in listed.splitlines():
        if "::" in name:
            cases.setdefault(name.partition("[")[0], []).append(f"{ROOT}/{name}")
    chosen = [case for some in cases.values() for case in some[:2]]  # XLA compiles each for seconds here, and shapes are the fuzz's
    assert len(cases) > 20
    # uncaptured: a report comes just before the end of the process
    assert f"{len(chosen)} passed" in run(sys.executable, "-m", "pytest", *options, "-s", *chosen, cwd=tmp_path, **told)
