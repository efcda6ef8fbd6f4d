"""What the flags say, as the arguments of the functions that do the work."""

import sys
from typing import Any

from command import flags
from runtime import UserError
from runtime.terminal import Interrupt


def read_requests() -> list[Any]:
    from sampling.requests import Request, nonempty, read_messages, read_prompt_file

    if flags.PROMPT.value is not None:
        return [Request(nonempty(flags.PROMPT.value, "--prompt"))]
    if flags.MESSAGES.value is not None:
        return [Request(read_messages(flags.MESSAGES.value))]
    if flags.PROMPT_FILE.value is not None:
        return read_prompt_file(flags.PROMPT_FILE.value, [flag.name for flag in flags.OPTIONS])
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt, --messages, --prompt_file, or text on standard input (--help shows all flags)")
    return [Request(nonempty(sys.stdin.read().removesuffix("\n"), "standard input"))]


def sampling_options(changes: dict[str, Any]) -> Any:
    """`SamplingOptions` from the flags, with a request's own on top."""
    from sampling import SamplingOptions

    bias = {}
    for entry in flags.LOGIT_BIAS.value:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit_bias={entry} is not TOKEN_ID=VALUE: write for example --logit_bias=42=-100") from None
    return SamplingOptions(**{flag.name: flag.value for flag in flags.OPTIONS} | changes, logit_bias=bias)


def formats() -> dict[str, Any]:
    """What `load` takes besides the model's name."""
    return {
        "weights": flags.WEIGHTS.value,
        "head_weights": flags.HEAD_WEIGHTS.value,
        "weights_group": flags.WEIGHTS_GROUP.value,
        "compute": flags.COMPUTE.value,
        "kv_dtype": flags.KV.value,
        "cache": flags.CACHE.value,
        "page_size": flags.PAGE_SIZE.value,
        "kv_group": flags.KV_GROUP.value,
        "layer_loop": flags.LAYER_LOOP.value,
        "kernels": flags.KERNELS.value,
        "activations": flags.ACTIVATIONS.value,
    }


def settings(interrupt: Interrupt, tables: list[str]) -> dict[str, Any]:
    """What `stream` and `generate_each` take alike; `tables` gets what --stats prints."""
    from sampling import report

    return {
        "raw": flags.RAW.value,
        "system": flags.SYSTEM.value,
        "parse_special": flags.PARSE_SPECIAL.value,
        "capacity": flags.CAPACITY.value,
        "steps": flags.STEPS.value,
        "pages": flags.KV_PAGES.value,
        "prefix_cache": flags.PREFIX_CACHE.value,
        "inspect": lambda batch: tables.append(report.cache_table(batch)),
        "cancelled": lambda: interrupt.asked,
    }


def check_options(requests: list[Any]) -> None:
    """What can be wrong without looking at the model, before it is fetched."""
    sampling_options({})
    for request in requests:
        try:
            sampling_options(request.options)
        except UserError as error:
            raise UserError(f"{request.where}{error}") from None
