"""The flags, as absl has them, and the groups that `--help` and the checks know them by."""

from absl import flags

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
    "Storage of weights; native is as the file packs them, auto the same with native kernels, else f32 on CPU and bf16 elsewhere. "
    "The others round them; w8a8 activations too.",
)
HEAD_WEIGHTS = flags.DEFINE_enum("head_weights", "auto", FORMATS, "Storage of embedding and head; auto as --weights, but int8 with int4.")
WEIGHTS_GROUP = flags.DEFINE_integer(
    "weights_group", None, "With --weights=int4 or int8: inputs that share a scale: 32, 64 or 128; default 64."
)
AGAINST = flags.DEFINE_enum(
    "against",
    None,
    FORMATS,
    "Load the model with these weights too, and compare the predictions of --weights with its own.",
)
KERNELS = flags.DEFINE_enum(
    "kernels",
    "auto",
    ["auto", "xla", "native", "pallas"],
    "What computes products with packed weights, and attention: XLA's own code, C++ for CPUs, or Pallas for TPUs and GPUs; auto is native "
    "where that runs, else xla.",
)
ACTIVATIONS = flags.DEFINE_enum(
    "activations",
    "auto",
    ["auto", "float", "int16", "int8"],
    "What native products with packed weights round to, with a scale for every 32: auto is int8, where those with an outlier keep 15 bits; "
    "int16 keeps 15 everywhere, for 0.7 of the speed with many tokens at once; float does not round. With int8 and int16 attention over a "
    "bf16 cache is in bf16.",
)
COMPUTE = flags.DEFINE_enum("compute", "auto", ["auto", "f32", "bf16"], "Number format of activations; auto is f32 on CPU, bf16 elsewhere.")
KV = flags.DEFINE_enum(
    "kv",
    "auto",
    ["auto", "f32", "bf16", "int8", "int4", "fp8"],
    "Number format of the KV cache; auto is f32 on a CPU without native kernels, else bf16.",
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
    "machine": (BATCH_SIZE, CAPACITY, STEPS, WEIGHTS, HEAD_WEIGHTS, WEIGHTS_GROUP, COMPUTE, KERNELS, ACTIVATIONS, *CACHE_FLAGS),
    "mesh": (MESH, LAYER_LOOP, EXPLAIN, *PROCESS_FLAGS),
}
_WRITTEN = (PROMPT, MESSAGES, PROMPT_FILE, LOGPROBS, JSON, RAW, SYSTEM, STATS, MESH, EXPLAIN, *EVAL_FLAGS, *PROCESS_FLAGS)
# What a task has no use for: a mistake, if it is given.
USELESS = {
    "chat": (PROMPT, MESSAGES, PROMPT_FILE, OUT, LOGPROBS, JSON, RAW, PREFIX_CACHE, *EVAL_FLAGS, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
    "convert": (*_WRITTEN, *QUANTIZE_FLAGS),
    "quantize": (*_WRITTEN, WEIGHTS, WEIGHTS_GROUP, LAYER_LOOP),
    "compare": (MESSAGES, PROMPT_FILE, OUT, LOGPROBS, RAW, SYSTEM, STATS, MESH, EXPLAIN, *EVAL_FLAGS, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
    "eval": (
        *(PROMPT, MESSAGES, PROMPT_FILE, OUT, LOGPROBS, RAW, SYSTEM, PARSE_SPECIAL, STATS, EXPLAIN, REFERENCE_MODEL, CAPACITY),
        *(KV_PAGES, PREFIX_CACHE, *QUANTIZE_FLAGS, *PROCESS_FLAGS),
    ),
    "generate": (REFERENCE_MODEL, *EVAL_FLAGS, *QUANTIZE_FLAGS),
}
