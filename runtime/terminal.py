"""A command's dealings with its terminal: flags and help, one-line errors with exit code 2, output, and Ctrl-C."""

import contextlib
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from runtime.errors import UserError

Groups = Mapping[str, Sequence[flags.FlagHolder]]


class Interrupt:
    """Ctrl-C as a question instead of an exception: the first one asks the loop to end, the second ends the program."""

    asked = False

    def _on_signal(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)


def show(text: str) -> None:
    """Writes to standard output, at once."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output can't be written: {error.strerror}; send it elsewhere") from None


class Muted(io.TextIOBase):
    """A standard output that nothing comes out of."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)


def own_stdout(speaks: bool) -> None:
    """From here on only this program writes to standard output, and not even that unless it `speaks`: `show` and `status` say nothing then,
    and only errors are printed. What libraries write there by themselves (Gloo does, for each process that it meets) is dropped.
    """
    with contextlib.suppress(AttributeError, OSError):  # there may be none
        sys.stdout.flush()
        own = os.dup(sys.stdout.fileno())
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    if not speaks:
        sys.stdout = Muted()


def status(text: str) -> None:
    if not isinstance(sys.stdout, Muted):
        print(text, file=sys.stderr)


@contextlib.contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with how much is done, and of how much: on a terminal it moves a bar on standard error that tells the time left."""
    import tqdm

    with tqdm.tqdm(desc=what, unit=f" {unit}", disable=not sys.stderr.isatty() or isinstance(sys.stdout, Muted), leave=False) as bar:

        def advance(done: int, total: int) -> None:
            if bar.total != total and not bar.disable:
                bar.reset(total)  # the clock starts now
            bar.update(done - bar.n)

        yield advance


def to_json(value: Any, encoding: str) -> str:
    """In plain characters, or escaped where `encoding` lacks one, or there is none (half a surrogate pair in an id)."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def help_text(doc: str, groups: Groups) -> str:
    """What `--help` prints: `doc`, then the flags by group."""
    lines = [doc]
    for title, group in groups.items():
        lines.append(f"{title}:")
        for holder in group:
            flag = flags.FLAGS[holder.name]
            several = flag.flag_type().startswith("multi")
            kind = "|".join(getattr(flag.parser, "enum_values", ())) or {"bool": "", "string": "TEXT"}.get(flag.flag_type(), "N")
            default = "" if flag.default in (None, False, []) else f" [{flag.default}]"
            text = flag.help.removeprefix(f"<{kind}>: ").split(";\n")[0]  # without what absl adds
            lines.append(f"  --{holder.name}{'=' * bool(kind)}{'TEXT' if several else kind}{default}")
            lines.append(f"        {text}{'; may be given again.' if several else ''}")
    return "\n".join([*lines, "\n--helpfull shows the flags of libraries as well.\n"])


def takes_value(argument: str) -> bool:
    """Whether the next argument is this flag's value: `--prompt -h` asks for no help."""
    name = argument.removeprefix("--")
    return name != argument and name in flags.FLAGS and not flags.FLAGS[name].boolean


def parse_flags(argv: list[str], doc: str, groups: Groups) -> list[str]:
    """absl's flags, with our exit codes: `--help` is 0, a wrong flag is one line and 2.

    Args:
      argv: the command line.
      doc: of the command.
      groups: its flags, by title, in the order that `--help` shows.
    """
    asked = {argument for before, argument in itertools.pairwise(argv) if not takes_value(before)}
    if asked & {"--help", "-help", "-h", "--helpshort"}:
        sys.exit(ending(lambda: show(help_text(doc, groups))))
    if asked & {"--helpfull", "-helpfull"}:
        sys.exit(ending(lambda: show(f"{doc}\n{flags.FLAGS.get_help()}\n")))
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise UserError(f"argument {rest[1]!r} is no flag: write --prompt {rest[1]!r}, or --help for all flags")
        return rest
    except flags.Error as error:
        sys.exit(fail(f"{error}; --help shows all flags"))
    except UserError as error:
        sys.exit(fail(error))


def fail(error: Exception | str) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def ending(work: Callable[[], int | None]) -> int:
    """The exit code of `work`, whatever befalls it that is no fault of ours."""
    try:
        return work() or 0
    except UserError as error:
        code = fail(error)
    except KeyboardInterrupt:
        status("\ninterrupted")
        return 130
    except BrokenPipeError:  # the reader of our output went away
        code = 141
    with contextlib.suppress(AttributeError, OSError):  # what could not be written must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
