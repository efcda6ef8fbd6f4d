"""What is wrong with the flags, told before anything heavy is imported or fetched."""

import os

from absl.flags import FlagHolder

from command import flags
from runtime import UserError
from runtime.files import check_writable


def is_given(flag: FlagHolder) -> bool:
    """Whether it is not what it is by default; 0 is a value."""
    return flag.value is not flag.default and flag.value != flag.default


def check_flags() -> None:
    """Flags that do not go together, and what can be judged without any other module."""
    if given := [flag for flag in flags.USELESS[flags.TASK.value] if is_given(flag)]:
        raise UserError(f"--task={flags.TASK.value} has no use for --{given[0].name}: leave out one of the two")
    if flags.MESH.value is None and (given := [flag for flag in flags.PROCESS_FLAGS if is_given(flag)]):
        raise UserError(f"--{given[0].name} is of a mesh over several processes: add --mesh, such as --mesh=model=4")
    if flags.EXPLAIN.value and flags.MESH.value is None:
        raise UserError("--explain_sharding is of a mesh: add --mesh, such as --mesh=model=4")
    if flags.DISTRIBUTED.value and (given := [flag for flag in flags.PROCESS_FLAGS[:3] if flag.value is not None]):
        raise UserError(f"--distributed finds what --{given[0].name} says: leave out one of the two")
    if flags.TASK.value == "eval":
        if flags.CACHE.value == "paged":
            raise UserError("--task=eval has no use for --cache=paged, which changes no prediction: leave out one of the two")
        if flags.AGAINST.value is not None and flags.AGAINST.value == flags.WEIGHTS.value:
            wrong = f"--against={flags.AGAINST.value} is what --weights is, too"
            raise UserError(f"{wrong}: give another one, such as --against=f32 --weights=bf16")
    if flags.TASK.value in ("convert", "quantize"):
        if flags.OUT.value is None:
            raise UserError(f"--task={flags.TASK.value} writes a folder: name it with --out=FOLDER")
        if os.path.exists(flags.OUT.value) and (not os.path.isdir(flags.OUT.value) or os.listdir(flags.OUT.value)):
            raise UserError(f"--out={flags.OUT.value} exists and is not an empty folder: name another one, or remove it")
        return
    if flags.TASK.value == "generate" and flags.LOGPROBS.value is not None and not flags.JSON.value and flags.OUT.value is None:
        raise UserError(f"--logprobs={flags.LOGPROBS.value} has nowhere to go, as text shows none: add --json or --out=FILE")
    if len(given := [flag.name for flag in (flags.PROMPT, flags.MESSAGES, flags.PROMPT_FILE) if flag.value is not None]) > 1:
        raise UserError(f"--{' and --'.join(given)} are given together: give one of them")
    for flag in (flags.BATCH_SIZE, flags.STEPS, flags.CAPACITY, flags.WINDOW, flags.STRIDE, flags.MAX_TOKENS):
        if flag.value is not None and flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value} is below 1: give at least 1")
    if flags.OUT.value is not None:
        check_writable(flags.OUT.value, "out")
        if flags.PROMPT_FILE.value is not None and os.path.realpath(flags.OUT.value) == os.path.realpath(flags.PROMPT_FILE.value):
            raise UserError(f"--out={flags.OUT.value} can't be written (it is the --prompt_file): give another file")
