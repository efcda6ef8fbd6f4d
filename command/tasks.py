"""One function per task: what it runs, what it prints, and its exit code."""

import contextlib
import signal
import sys
from typing import Any

from command import flags
from command.arguments import check_options, formats, read_requests, sampling_options, settings
from command.processes import agree, interruption, with_seeds
from runtime import UserError
from runtime.files import replacing
from runtime.terminal import Interrupt, fail, progress_bar, show, status, to_json
from sharding import make_mesh
from sharding.processes import Processes


def run_task(sizes: dict[str, int] | None, processes: Processes) -> int:
    """The task, on a mesh of these sizes; exit codes as of `main`."""
    requests = read_requests() if flags.TASK.value == "generate" else []
    # Heavy, and not needed to find a mistake in the above.
    from runtime import enable_compilation_cache
    from sampling import load

    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_options(requests)
    enable_compilation_cache()
    if flags.TASK.value == "compare":
        return compare_models()
    placed: dict[str, Any] = {} if sizes is None else {"mesh": make_mesh(sizes)}
    if processes.count > 1:
        placed["progress"] = agree(processes, requests)
        requests = with_seeds(requests, processes.shared_seed())
    if flags.TASK.value == "eval":
        return evaluate_text(placed)
    if flags.TASK.value == "quantize":
        return quantize()
    lm = load(flags.MODEL.value, **formats(), **placed)
    if flags.EXPLAIN.value:
        from sampling import report

        status(report.sharding_tables(lm, flags.BATCH_SIZE.value if flags.PROMPT_FILE.value is not None else 1, flags.CAPACITY.value))
    if flags.TASK.value == "chat":
        return chat(lm)
    if flags.TASK.value == "convert":
        return convert(lm)
    if flags.PROMPT_FILE.value is None and not flags.JSON.value and flags.OUT.value is None:
        return stream_one(lm, requests[0], processes)
    return generate_all(lm, requests, processes)


def list_models() -> int:
    from checkpoint import presets

    for name, preset in sorted(presets().items()):
        show(f"{name:28} {preset.size / 1e6:6.0f} MB  {preset.license:12} context {preset.context:6}  {preset.description}\n")
    return 0


def stream_one(lm: Any, request: Any, processes: Processes) -> int:
    from sampling import report, stream

    tables: list[str] = []
    with interruption(processes) as interrupt:
        for piece in stream(lm, request.prompt, sampling_options(request.options), **settings(interrupt, tables)):
            show(piece.text)
    show("\n")
    print_stats(tables)
    status(f"[{piece.completion.finish_reason}] {report.summary(lm, [piece.completion])}")
    return 130 if interrupt.asked else 0


def generate_all(lm: Any, requests: list[Any], processes: Processes) -> int:
    from sampling import PromptError, generate_each, report

    prompts, options = [request.prompt for request in requests], [sampling_options(request.options) for request in requests]
    tables: list[str] = []
    with interruption(processes) as interrupt:
        try:
            done = dict(generate_each(lm, prompts, options, batch_size=flags.BATCH_SIZE.value, **settings(interrupt, tables)))
        except PromptError as error:
            raise UserError(f"{requests[error.index].where}{error}") from None
    results = [requests[index].extra | report.as_json(lm, done[index]) for index in sorted(done)]
    if flags.OUT.value is not None and processes.first:
        with replacing(flags.OUT.value) as out:
            out.writelines(to_json(result, "utf-8") + "\n" for result in results)
    if flags.JSON.value:
        whole = results if flags.PROMPT_FILE.value is not None else results[0] if results else None
        show(to_json(whole, getattr(sys.stdout, "encoding", "utf-8")) + "\n")
    elif flags.OUT.value is None:
        show("\n---\n".join(result["text"] for result in results) + "\n")
    print_stats(tables)
    if done:
        status(f"[{len(done)} of {len(requests)}] {report.summary(lm, list(done.values()))}")
    return 130 if interrupt.asked else 0


def chat(lm: Any) -> int:
    from sampling import Conversation, report

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and arrow keys
    conversation = Conversation(
        lm,
        sampling_options({}),
        system=flags.SYSTEM.value,
        parse_special=flags.PARSE_SPECIAL.value,
        capacity=flags.CAPACITY.value,
        steps=flags.STEPS.value,
        pages=flags.KV_PAGES.value,
    )
    status(f"{lm.name}: Ctrl-C stops an answer, Ctrl-D ends the chat.")
    while True:
        try:
            turn = input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            status("")
            print_stats([report.cache_table(conversation.batch)])
            return 0
        if not turn.strip():
            continue
        try:
            completion = None
            with Interrupt() as interrupt, contextlib.closing(conversation.say(turn)) as pieces:
                for piece in pieces:
                    show(piece.text)
                    completion = piece.completion
                    if interrupt.asked:
                        break
            show("\n")
            numbers = report.summary(lm, [completion]) if completion else f"{conversation.held} tokens held"
            status(f"[{completion.finish_reason if completion else 'interrupted'}] {numbers}")
        except UserError as error:
            fail(error)


def print_stats(tables: list[str]) -> None:
    if flags.STATS.value:
        status("\n".join(tables))


def convert(lm: Any) -> int:
    from sampling import load

    lm.save(flags.OUT.value)
    again = load(flags.OUT.value, **formats())
    before, after = lm.load_seconds, again.load_seconds
    show(f"{flags.OUT.value}: {lm.config.vocab_size} tokens, {len(lm.config.layers)} layers, {lm.weight_bytes / 1e6:.0f} MB of weights\n")
    show(f"load: {before:.2f} s from {flags.MODEL.value}, {after:.2f} s from {flags.OUT.value} ({before / after:.2f} times as fast)\n")
    return 0


def quantize() -> int:
    from sampling import load
    from sampling.pack import pack_model, scheme_of

    scheme = scheme_of(flags.BITS.value, flags.GROUP.value, flags.SYMMETRIC.value)
    lm = load(flags.MODEL.value, **formats() | {"weights": "f32", "head_weights": "f32"})
    with progress_bar("Quantizing", "layers") as advance:
        done = pack_model(
            *(lm, flags.OUT.value, flags.METHOD.value, scheme),
            calibration=flags.CALIBRATION.value,
            act_order=flags.ACT_ORDER.value,
            head=flags.HEAD_WEIGHTS.value,
            progress=lambda done, total, seconds_left: advance(done, total),
        )
    before, after = lm.weight_bytes / 1e6, done.weight_bytes / 1e6
    show(f"{flags.OUT.value}: {after:.1f} MB of weights, {after / before:.3f} of f32's, in {done.load_seconds:.0f} s\n")
    return 0


def compare_models() -> int:
    import checkpoint
    from parity import compare
    from tokenizer import tokenizer_from_folder

    model = checkpoint.resolve(flags.MODEL.value)
    prompts = None
    if flags.PROMPT.value is not None:
        prompts = [tokenizer_from_folder(model).encode(flags.PROMPT.value, parse_special=flags.PARSE_SPECIAL.value)]
    found = compare(model, flags.REFERENCE_MODEL.value, prompts)
    show((to_json(found.as_json(), "ascii") if flags.JSON.value else found.table()) + "\n")
    return 0 if found.agrees else 1


def evaluate_text(placed: dict[str, Any]) -> int:
    from sampling import load, measure_quality
    from sampling.evaluate import window_and_stride
    from sampling.quality import read_evaluation_text

    text, name = read_evaluation_text(flags.TEXT_FILE.value)
    window_and_stride(flags.WINDOW.value, flags.STRIDE.value)  # what no model could do, before one is fetched
    candidates = {}
    if flags.AGAINST.value is not None:
        plain = {"weights": flags.AGAINST.value, "head_weights": "auto", "weights_group": None}
        candidates[flags.AGAINST.value] = load(flags.MODEL.value, **formats() | plain, **placed)
    candidates[flags.WEIGHTS.value] = load(flags.MODEL.value, **formats(), **placed)
    candidates = {name: (lm, lm.kv_format) for name, lm in candidates.items()}
    sizes = {"window": flags.WINDOW.value, "stride": flags.STRIDE.value, "max_tokens": flags.MAX_TOKENS.value}
    with progress_bar("Predicting", "tokens") as progress:
        found = measure_quality(candidates, text, name=name, **sizes, progress=progress)
    show((to_json(found.as_json(), getattr(sys.stdout, "encoding", "utf-8")) if flags.JSON.value else found.table()) + "\n")
    return 0
