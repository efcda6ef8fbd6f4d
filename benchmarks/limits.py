"""What a perfect implementation could reach: the bytes that must move over the bandwidth, or the arithmetic over its rate."""

import dataclasses

from benchmarks.cases import Case


@dataclasses.dataclass(frozen=True)
class Work:
    """What a model, as it is stored, asks of a machine.

    Attributes:
      body_weights: weights that every token is multiplied with.
      head_weights: weights that only tokens with logits are multiplied with.
      weight_bytes: read once by every step, whatever its batch.
      kv_bytes: per token held.
      attention_flops: per pair of a query and a slot that it sees, over all layers and heads.
    """

    body_weights: int
    head_weights: int
    weight_bytes: int
    kv_bytes: int
    attention_flops: int


@dataclasses.dataclass(frozen=True)
class Limit:
    """The best rate that the machine's ceilings allow, and which of them binds."""

    tokens_per_s: float
    bound: str  # "reading" or "arithmetic"
    bytes: float  # that one call of the program (a prefill, a decode step) must read
    flops: float  # that it must do


def limit(case: Case, work: Work, read_bytes_per_s: float, flop_per_s: float) -> Limit:
    """The limit of a case.

    decode  bytes = weights + B * held * kv             flops = B * (2 * (body + head) + held * attention)
    prefill bytes = weights                             flops = 2 * (n * body + head) + n (n + 1) / 2 * attention

    `held` is the mean over the steps. Only a prompt's last token needs logits, and a query sees only what came before it.
    """
    if case.kind == "prefill":
        n = case.held
        moved = work.weight_bytes
        flops = 2 * (n * work.body_weights + work.head_weights) + n * (n + 1) / 2 * work.attention_flops
        tokens = n
    else:
        held = case.held + (case.steps + 1) / 2
        moved = work.weight_bytes + case.batch * held * work.kv_bytes
        flops = case.batch * (2 * (work.body_weights + work.head_weights) + held * work.attention_flops)
        tokens = case.batch
    reading, arithmetic = moved / read_bytes_per_s, flops / flop_per_s
    return Limit(tokens / max(reading, arithmetic), "reading" if reading >= arithmetic else "arithmetic", moved, flops)
