"""Models of the Hugging Face Hub by name: `hf:org/name[@revision]`, or `hf:org/name/file.gguf[@revision]`.

`huggingface_hub` does the work: its cache (HF_HOME) is shared with other programs, it takes up a connection that broke, and keeps the whole
files of a download that failed. Here is which files are wanted, that they are all there, and what to tell the user when they can't be had.
"""

import contextlib
import dataclasses
import glob
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoint.download import Progress
from runtime import UserError

PREFIX = "hf:"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SMALL_FILES = frozenset(
    {
        *("config.json", "generation_config.json", INDEX),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    }
)
NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
LISTED = 5  # files that an error names
TIMEOUT = 10.0  # seconds for the first answer of the Hub
KEPT = "files that came whole are kept"
SIGN_IN = "set HF_TOKEN to a token that may read it, or run `hf auth login`"


@dataclasses.dataclass(frozen=True)
class HubName:
    """What a name asks for."""

    text: str  # as it was given
    repo: str  # org/name
    file: str | None  # a .gguf file's path in it; None: the whole model
    revision: str | None  # a branch, tag or commit


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    sizes: dict[str, int]  # bytes, by file name


def parse(text: str) -> HubName:
    """Takes `hf:org/name[/file.gguf][@revision]` apart.

    Raises:
        UserError: it is written in another way.
    """
    path, at, revision = text.removeprefix(PREFIX).partition("@")
    parts = path.split("/")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    usage = f"write {PREFIX}org/name or {PREFIX}org/name/file.gguf, and @revision after it for a branch, tag or commit"
    if not NAME.fullmatch(repo) or ".." in repo or "--" in repo:
        raise UserError(f"model {text!r} does not name a repository of the Hugging Face Hub: {usage}")
    if len(parts) > 2 and (not file.lower().endswith(".gguf") or not all(part.strip(".") for part in parts)):
        raise UserError(f"model {text!r} asks for {file!r}, which is no .gguf file: {usage}")
    if at and (not revision or revision != revision.strip()):
        raise UserError(f"model {text!r} has an empty revision: {usage}")
    return HubName(text=text, repo=repo, file=file or None, revision=revision or None)


def fetch_from_hub(text: str, *, progress: Progress | None = None) -> Path:
    """The model's files in the Hub's cache on this machine, downloaded if they are not there.

    Without a network, or with HF_HUB_OFFLINE=1, a model that is in the cache in full is found there; the former is said.

    Args:
        text: `hf:org/name[@revision]` or `hf:org/name/file.gguf[@revision]`.
        progress: where to report; on a terminal, `huggingface_hub` shows its own bars.

    Returns:
        A folder with config.json, *.safetensors and tokenizer files; or a .gguf file, the first one of a split model.

    Raises:
        UserError: `huggingface_hub` is not installed, there is no such model, it is gated or private, it has no weights in a format that
            can be read, or the Hub can't be reached and the cache does not hold it.
    """
    name = parse(text)
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise UserError(
            f"{text} is a model of the Hugging Face Hub, and the package that downloads from there is missing ({error}): "
            f"run `{sys.executable or 'python'} -m pip install huggingface_hub`"
        ) from error
    progress = Progress() if progress is None else progress
    if name.revision and COMMIT.fullmatch(name.revision) and (found := _cached(name)):
        return found  # a commit never changes
    listing = _listing(name, progress)
    if listing is None:
        if found := _cached(name):
            return found
        raise UserError(
            f"{text} is not in the cache ({constants.HF_HUB_CACHE}), at least not in full, and the Hugging Face Hub can't be reached: "
            "connect to the network (and unset HF_HUB_OFFLINE), or give the path of a model that is on this machine"
        )
    files = listing.sizes
    if name.file is not None:
        parts = _split_parts(name.file)
        if lacking := [part for part in parts if part not in files]:
            raise UserError(f"{text}: {name.repo} has no file {lacking[0]!r}; {_what_there_is(name, files)}")
        return _download(name, listing, parts, progress) / name.file
    if not any(_is_weights(file) for file in files):
        raise UserError(f"{text} has no .safetensors weights; {_what_there_is(name, files)}")
    if "config.json" not in files:
        raise UserError(f"{text} has no config.json, which says what model it is: use a repository in the format of transformers")
    folder = _download(name, listing, sorted(SMALL_FILES & files.keys()), progress)  # first: all are there once the weights are
    return _download(name, listing, _weights(text, files, lambda: folder / INDEX), progress)


def _listing(name: HubName, progress: Progress) -> Listing | None:
    """What the repository holds; None if the Hub can't be reached."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT)
        return Listing(commit=info.sha, sizes={sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []})
    except errors.OfflineModeIsEnabled:
        return None
    except (*_http_errors(), ValueError) as error:  # ValueError: what answers is a sign-in page, not the Hub
        status = _status(error)
        if isinstance(error, errors.HFValidationError) or (status is not None and status < 500):
            raise _explained(name, error) from error
        reason = f"it answers with status {status}" if status else _short(error)
        progress.notice(f"the Hugging Face Hub can't be reached ({reason}): looking for {name.text} in the cache")
        return None


def _download(name: HubName, listing: Listing, files: Collection[str], progress: Progress) -> Path:
    """Brings the files into the cache, and returns the folder that they are in."""
    import huggingface_hub

    missing = [file for file in files if _cached_file(name, file, listing.commit) is None]
    step = f"Downloading {name.text}: {', '.join(missing[:LISTED])}" + f" and {len(missing) - LISTED} more" * (len(missing) > LISTED)
    if missing:
        progress.notice(f"{step} ({sum(listing.sizes[file] for file in missing) / 1e6:.1f} MB) ...")
    try:
        with _bars_on_terminals_only():
            # Names, not patterns: '*' would match sub-folders, where many repositories keep the same weights in other formats.
            folder = huggingface_hub.snapshot_download(
                name.repo, revision=name.revision, allow_patterns=[glob.escape(file) for file in files], etag_timeout=TIMEOUT
            )
    except Exception as error:  # the transfer has a library of its own (hf_xet), with exceptions of no common class
        raise _explained(name, error) from error
    for file in files:
        if not (Path(folder) / file).is_file():
            raise UserError(f"{name.text}: {file} did not come, so the download is incomplete; try again: {KEPT}")
    if missing:
        progress.notice(f"{step}: done")
    return Path(folder)


def _cached(name: HubName) -> Path | None:
    """What `fetch_from_hub` returns, if the cache holds all of it."""
    if name.file is not None:
        found = [_cached_file(name, part, name.revision) for part in _split_parts(name.file)]
        return None if None in found else _cached_file(name, name.file, name.revision)
    config = _cached_file(name, "config.json", name.revision)
    if config is None:
        return None
    folder = config.parent
    present = {path.name for path in folder.iterdir() if path.is_file()}
    try:
        weights = _weights(name.text, present, lambda: folder / INDEX)
    except UserError:
        return None
    return folder if weights else None


def _cached_file(name: HubName, file: str, revision: str | None) -> Path | None:
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name.repo, file, revision=revision)
    return Path(found) if isinstance(found, str) and Path(found).is_file() else None


def _is_weights(file: str) -> bool:
    return "/" not in file and file.endswith(".safetensors")


def _weights(text: str, files: Collection[str], index: Callable[[], Path]) -> list[str]:
    """The weights files among `files`: those that the index names, or the whole model in one, or whatever there is.

    Raises:
        UserError: the index is damaged, or names a file that is not there.
    """
    if INDEX in files:
        try:
            shards = sorted(set(json.loads(index().read_text(encoding="utf-8"))["weight_map"].values()))
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{text}: its {INDEX} is damaged ({type(error).__name__} {error}); use another revision") from error
        if lacking := [shard for shard in shards if shard not in files]:
            raise UserError(f"{text}: its {INDEX} names {lacking[0]!r}, which is not there; use another revision")
        return shards
    return [WHOLE] if WHOLE in files else sorted(filter(_is_weights, files))


def _split_parts(file: str) -> list[str]:
    """All files of a split GGUF model: `x-00001-of-00003.gguf` and its two siblings."""
    match = SPLIT.fullmatch(file)
    if match is None:
        return [file]
    stem, _, count = match.groups()
    return [f"{stem}-{number:05}-of-{count}{file[-5:]}" for number in range(1, int(count) + 1)]


def _what_there_is(name: HubName, files: Collection[str]) -> str:
    """What the repository holds instead, and the remedy."""
    ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
    if ggufs:
        shown = ", ".join(ggufs[:LISTED]) + f" and {len(ggufs) - LISTED} more" * (len(ggufs) > LISTED)
        at = f"@{name.revision}" if name.revision else ""
        return f"it has {shown}: give one of them, such as {PREFIX}{name.repo}/{ggufs[0]}{at}"
    pickled = sorted(file for file in files if PurePosixPath(file).suffix in (".bin", ".pth", ".pt"))
    nested = sorted(file for file in files if file.endswith(".safetensors"))
    if pickled and not nested:
        return f"it has {pickled[0]}: convert it to safetensors with transformers, or look for a converted copy of the model"
    if nested:
        return f"it has {nested[0]}: download that folder and give its path"
    shown = ", ".join(sorted(files)[:LISTED]) + " and more" * (len(files) > LISTED)
    return f"it has {shown or 'no files'}: use another repository"


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub import utils

    hide = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            utils.enable_progress_bars()


def _http_errors() -> tuple[type[BaseException], ...]:
    """What may come of a request. The base of the Hub's own error is that of its HTTP library, another one in each of its versions."""
    from huggingface_hub import errors

    return (OSError, errors.HfHubHTTPError.__bases__[0])


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _explained(name: HubName, error: Any) -> UserError:
    """One line for what `huggingface_hub` says, and what to do about it."""
    from huggingface_hub import constants, errors

    text, status = name.text, _status(error)
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{text} is gated: ask for access on {constants.ENDPOINT}/{name.repo}, then {SIGN_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{text}: {name.repo} has no revision {name.revision or 'main'!r}; give one of its branches, tags or commits")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"{text} is not on the Hugging Face Hub, or is private: check its spelling; for a private one, {SIGN_IN}")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{text} is no name of a model of the Hugging Face Hub: {_short(error)}; check its spelling")
    if status in (401, 403):
        return UserError(f"{text}: the Hugging Face Hub refuses access (status {status}, {_short(error)}); {SIGN_IN}")
    if status == 429:
        return UserError(f"{text}: the Hugging Face Hub has too many requests from here (status 429); wait, or {SIGN_IN}")
    if status is None and getattr(error, "errno", None) is not None:
        reason = error.strerror or type(error).__name__
        return UserError(f"{text}: the cache {constants.HF_HUB_CACHE} can't be used ({reason}); set HF_HOME to a folder on another disk")
    return UserError(f"{text}: the download broke off ({_short(error)}); check the network and try again: {KEPT}")
