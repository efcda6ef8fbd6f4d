"""The command line as a mesh of several processes, started as a user starts them."""

import json
import pathlib
import socket

import pytest

MESH = "--mesh=data=2"
CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.fixture
def both(start):
    """both(*common, first=(), second=()): two processes with these flags, until both have ended."""

    def run(*common: str, first: tuple[str, ...] = (), second: tuple[str, ...] = ()) -> list:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        run_of = [MESH, f"--coordinator=127.0.0.1:{port}", "--num_processes=2", *common]
        started = [start(*run_of, f"--process_id={index}", *own, env=CPU) for index, own in enumerate((first, second))]
        return [session.end() for session in started]

    return run


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--mesh=model=0"], "--mesh=model=0: model=0 is below 1"),
        (["--coordinator=host:1"], "--coordinator is of a mesh over several processes: add --mesh, such as --mesh=model=4"),
        (["--distributed"], "--distributed is of a mesh over several processes: add --mesh"),
        ([MESH, "--distributed", "--process_id=0"], "--distributed finds what --process_id says: leave out one of the two"),
        ([MESH, "--num_processes=2"], "--coordinator is missing: several processes need all of --coordinator=HOST:PORT"),
        (["--mesh=data=3", "--num_processes=2"], "--mesh=data=3 is of 3 devices, which 2 processes can't share: give a multiple of 2"),
        (["--task=chat", MESH, "--process_id=0"], "--task=chat has no use for --process_id: leave out one of the two"),
        (["--task=convert", MESH], "--task=convert has no use for --mesh: leave out one of the two"),
    ],
)
def test_wrong_flags_of_a_mesh_are_refused(cli, assert_refused, flags, line):
    assert_refused(cli(*flags, stdin=b"a", env=CPU), line)


@pytest.mark.slow
def test_two_processes_answer_and_one_prints(both, tiny, tmp_path):
    """A data-parallel mesh of two, sampled: the seed is drawn once, or the processes would part."""
    flags = (tiny.flag, "--prompt=abc", "--raw", "--max_new_tokens=9", "--temperature=1", "--ignore_eos", "--json", *tiny.ascii_only)
    first, second = both(*flags, first=("--stats",), second=("--stats",))
    assert first.code == second.code == 0, (first, second)
    assert len(json.loads(first.out)["tokens"]) == 9  # nothing but the answer is on standard output
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second, name",
    [
        (["--prompt=a"], ["--prompt=b"], "the prompts"),
        (["--prompt=a"], ["--prompt=a", "--max_new_tokens=3"], "--max_new_tokens (3, not 256)"),
        (["--prompt=a"], ["--prompt=a", "--out=x.json"], "--out (true, not false)"),
    ],
)
def test_different_work_ends_both_with_one_line(both, tiny, assert_refused, first, second, name):
    for done in both(tiny.flag, first=tuple(first), second=tuple(second)):
        assert_refused(done, f"process 1 differs from process 0 in {name}: give all processes the same")


@pytest.mark.slow
def test_different_models_end_both_with_one_line(both, tiny, assert_refused, tmp_path):
    other = tmp_path / "tiny.gguf"
    other.write_bytes(pathlib.Path(tiny.path).read_bytes() + b" ")
    for done in both("--prompt=a", first=(tiny.flag,), second=(f"--model={other}",)):
        assert_refused(done, "process 1 differs from process 0 in the model's files: give all processes the same")
