"""Diptych on the command line: flags in, one call of `sampling` out.

python run_inference.py --prompt "Why is the sky blue?"
python run_inference.py --task=chat
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

from absl import app, flags, logging

from runtime import UserError, enable_compilation_cache

TASK = flags.DEFINE_enum("task", "generate", ["generate", "chat"], "generate: answer prompts; chat: talk in the terminal.")
MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A preset's name (see --list_models), or the path of a .gguf file.")
LIST_MODELS = flags.DEFINE_bool("list_models", False, "Print the presets and end.")

PROMPT = flags.DEFINE_string("prompt", None, "The prompt: the user's turn of a chat, or plain text with --raw. Default: standard input.")
MESSAGES = flags.DEFINE_string("messages", None, 'A JSON file with a chat: [{"role": "user", "content": "..."}, ...].')
PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    'A file with a JSON object per line: {"prompt": "..."} or {"messages": [...]}, and any sampling option by its flag\'s name. '
    '"id" is passed through.',
)
OUT = flags.DEFINE_string("out", None, "Write a JSON object per answer to this file, in the order of the prompts.")
SYSTEM = flags.DEFINE_string("system", None, "The system message of the chat.")
RAW = flags.DEFINE_bool("raw", False, "Take prompts as they are, without the model's chat template.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object (a list for --prompt_file) instead of text.")

MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Tokens per answer at most.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token; above, logits are divided by it.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 keeps all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens that together have this probability.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this many times as likely as the likeliest.")
REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Divides the logits of tokens of prompt and answer; 1 is off.")
PRESENCE_PENALTY = flags.DEFINE_float("presence_penalty", 0.0, "Subtracted from the logits of tokens that the answer holds.")
FREQUENCY_PENALTY = flags.DEFINE_float("frequency_penalty", 0.0, "Subtracted as often as the answer holds the token.")
LOGIT_BIAS = flags.DEFINE_multi_string("logit_bias", [], "TOKEN_ID=VALUE, added to that token's logit; may be repeated.")
SEED = flags.DEFINE_integer("seed", None, "The same seed gives the same tokens. Default: a fresh one.")
STOP = flags.DEFINE_multi_string("stop", [], "End the answer just before this string; may be repeated.")
IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on after an end-of-sequence token.")
LOGPROBS = flags.DEFINE_integer(
    "logprobs", None, "Report log-probabilities of the chosen and this many of the likeliest tokens (--json, --out)."
)

BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Prompts of --prompt_file that decode together.")
CAPACITY = flags.DEFINE_integer("capacity", None, "Cache slots per row. Default: what prompt and answer may need.")
STEPS = flags.DEFINE_integer("steps_per_dispatch", 8, "Tokens per dispatch of the decode loop; text arrives that many tokens at a time.")
WEIGHTS = flags.DEFINE_enum("weights", "auto", ["auto", "f32", "bf16"], "Storage of weights. auto: f32 on CPU, bf16 elsewhere.")
COMPUTE = flags.DEFINE_enum("compute", "auto", ["auto", "f32", "bf16"], "Number format of activations; auto as for --weights.")
KV = flags.DEFINE_enum("kv", "auto", ["auto", "f32", "bf16"], "Number format of the KV cache; auto as for --weights.")
CACHE = flags.DEFINE_enum("cache", "dense", ["dense"], "Layout of the KV cache.")

OPTION_FLAGS = {
    flag.name: flag
    for flag in (
        *(MAX_NEW_TOKENS, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY),
        *(SEED, STOP, IGNORE_EOS, LOGPROBS),
    )
}


class Interrupt:
    """Ctrl-C as a question instead of an exception: the first one asks the loop to end, the second ends the program."""

    def __init__(self):
        self.asked = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> "Interrupt":
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._before)


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its options, and what to copy into its result."""

    prompt: Any
    options: dict[str, Any]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def main() -> int:
    """Returns the exit code: 0, or 130 after Ctrl-C."""
    if LIST_MODELS.value:
        return list_models()
    requests = [] if TASK.value == "chat" else read_requests()
    check_options(requests)
    enable_compilation_cache()
    from sampling import load  # heavy, and not needed for any of the above

    lm = load(MODEL.value, weights=WEIGHTS.value, compute=COMPUTE.value, kv_dtype=KV.value)
    if TASK.value == "chat":
        return chat(lm)
    if PROMPT_FILE.value is None and not JSON.value and OUT.value is None:
        return stream_one(lm, requests[0])
    return generate_all(lm, requests)


def list_models() -> int:
    from checkpoint import presets

    for name, preset in sorted(presets().items()):
        print(f"{name:28} {preset.size / 1e6:6.0f} MB  {preset.license:12} context {preset.context:6}  {preset.description}")
    return 0


def sampling_options(changes: dict[str, Any]) -> Any:
    """`SamplingOptions` from the flags, with a request's own on top."""
    from sampling import SamplingOptions

    values = {name: flag.value for name, flag in OPTION_FLAGS.items()} | changes
    values["logit_bias"] = parse_bias(LOGIT_BIAS.value)
    return SamplingOptions(**values)


def parse_bias(entries: list[str]) -> dict[int, float]:
    bias = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit_bias={entry} is not TOKEN_ID=VALUE: write for example --logit_bias=42=-100") from None
    return bias


def check_options(requests: list[Request]) -> None:
    """What can be wrong without looking at the model, before it is fetched."""
    sampling_options({})
    for number, request in enumerate(requests, 1):
        try:
            sampling_options(request.options)
        except UserError as error:
            raise UserError(f"{PROMPT_FILE.value} line {number}: {error}") from None
    for flag in (BATCH_SIZE, STEPS):
        if flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value} is below 1: give at least 1")
    if CAPACITY.value is not None and CAPACITY.value < 1:
        raise UserError(f"--capacity={CAPACITY.value} is below 1: give at least 1")
    if OUT.value is not None:
        folder = pathlib.Path(OUT.value).absolute().parent
        target = pathlib.Path(OUT.value)
        if target.is_dir() or not folder.is_dir() or not os.access(target if target.exists() else folder, os.W_OK):
            reason = "it is a folder" if target.is_dir() else "no write permission" if folder.is_dir() else f"{folder} does not exist"
            raise UserError(f"--out={OUT.value} can't be written ({reason}): give a file in a folder that you may write to")


def read_requests() -> list[Request]:
    given = [flag.name for flag in (PROMPT, MESSAGES, PROMPT_FILE) if flag.value is not None]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} are given together: give one of them")
    if PROMPT.value is not None:
        return [Request(nonempty(PROMPT.value, "--prompt"), {})]
    if MESSAGES.value is not None:
        return [Request(nonempty(parse_json(read_text(MESSAGES.value, "messages"), MESSAGES.value), MESSAGES.value), {})]
    if PROMPT_FILE.value is not None:
        lines = read_text(PROMPT_FILE.value, "prompt_file").splitlines()
        requests = [parse_line(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not requests:
            raise UserError(f"--prompt_file={PROMPT_FILE.value} holds no prompt: give a JSON object per line")
        return requests
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --messages, --prompt_file, or text on standard input (--help shows all flags)")
    return [Request(nonempty(sys.stdin.read().removesuffix("\n"), "standard input"), {})]


def nonempty(prompt: Any, where: str) -> Any:
    if not prompt:
        raise UserError(f"the prompt of {where} is empty: give at least one character")
    return prompt


def read_text(path: str, flag: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--{flag}={path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except OSError as error:
        raise UserError(f"--{flag}={path} can't be read: {error.strerror}; check the path") from None


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; mend it") from None


def parse_line(number: int, line: str) -> Request:
    where = f"{PROMPT_FILE.value} line {number}"
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}; give one object per line") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise UserError(f'{where} needs either "prompt" or "messages": give an object with one of them')
    prompt = nonempty(fields.pop("prompt", None) or fields.pop("messages", None), where)
    extra = {"id": fields.pop("id")} if "id" in fields else {}
    if unknown := [name for name in fields if name not in OPTION_FLAGS]:
        raise UserError(f"{where} has unknown option {unknown[0]!r}: use {', '.join(sorted(OPTION_FLAGS))}")
    return Request(prompt, fields, extra)


def stream_one(lm: Any, request: Request) -> int:
    from sampling import report, stream

    completion = None
    with Interrupt() as interrupt:
        pieces = stream(
            lm,
            request.prompt,
            sampling_options(request.options),
            raw=RAW.value,
            system=SYSTEM.value,
            capacity=CAPACITY.value,
            steps=STEPS.value,
        )
        for piece in pieces:
            print(piece.text, end="", flush=True)
            completion = piece.completion
            if interrupt.asked:
                break
    print(flush=True)
    if completion is None:
        print("[interrupted]", file=sys.stderr)
        return 130
    print(f"[{completion.finish_reason}] {report.summary(lm, [completion])}", file=sys.stderr)
    return 0


def generate_all(lm: Any, requests: list[Request]) -> int:
    from sampling import generate_each, report

    done: dict[int, Any] = {}
    with Interrupt() as interrupt:
        answers = generate_each(
            lm,
            [request.prompt for request in requests],
            [sampling_options(request.options) for request in requests],
            raw=RAW.value,
            system=SYSTEM.value,
            batch_size=BATCH_SIZE.value,
            capacity=CAPACITY.value,
            steps=STEPS.value,
        )
        for index, completion in answers:
            done[index] = completion
            if interrupt.asked:
                break
    results = [requests[index].extra | report.as_json(lm, done[index]) for index in sorted(done)]
    if OUT.value is not None:
        with replacing(OUT.value) as out:
            out.writelines(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
    if JSON.value:
        print(json.dumps(results if PROMPT_FILE.value is not None else results[0] if results else None, ensure_ascii=False))
    elif OUT.value is None:
        print("\n---\n".join(result["text"] for result in results))
    if done:
        print(f"[{len(done)} of {len(requests)}] {report.summary(lm, list(done.values()))}", file=sys.stderr)
    return 130 if interrupt.asked and len(done) < len(requests) else 0


@contextlib.contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A file that takes `path`'s place when it is complete."""
    target = pathlib.Path(path).absolute()
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            yield file
        os.replace(file.name, target)
    except OSError as error:
        raise UserError(f"--out={path} can't be written: {error.strerror}; the answers are lost, give another file") from error


def chat(lm: Any) -> int:
    from sampling import Conversation, report

    conversation = Conversation(lm, sampling_options({}), system=SYSTEM.value, capacity=CAPACITY.value, steps=STEPS.value)
    print(f"{lm.name}: Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            turn = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130
        try:
            with Interrupt() as interrupt:
                completion = None
                with contextlib.closing(conversation.say(turn)) as pieces:
                    for piece in pieces:
                        print(piece.text, end="", flush=True)
                        completion = piece.completion
                        if interrupt.asked:
                            break
            print(flush=True)
            status = report.summary(lm, [completion]) if completion else f"[interrupted] {conversation.held} tokens held"
            print(f"[{completion.finish_reason}] {status}" if completion else status, file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags, with our exit codes: `--help` is 0, a wrong flag is one line and 2."""
    if any(argument in ("--help", "-help", "-h", "--helpshort") for argument in argv[1:]):
        print(__doc__)
        print(flags.FLAGS.module_help(sys.modules[__name__]))
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise UserError(f"argument {rest[1]!r} is no flag: write --prompt {rest[1]!r}, or --help for all flags")
        return rest
    except (flags.Error, UserError) as error:
        sys.exit(fail(error))


def fail(error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def guarded(_: list[str]) -> None:
    if logging.get_verbosity() == logging.INFO:  # app.run's default, at which JAX tells which platforms are not there
        logging.set_verbosity(logging.WARNING)
    try:
        code = main()
    except UserError as error:
        code = fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def run() -> None:
    """The console script."""
    app.run(guarded, flags_parser=parse_flags)


if __name__ == "__main__":
    run()
