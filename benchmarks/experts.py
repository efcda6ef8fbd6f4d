"""A mixture of experts on this machine: what the number of experts costs, and how near a prefill comes to a plain product.

    python benchmarks/experts.py

One token that goes to two of E experts reads two experts' weights, however many there are: the time for 64 stands beside that for 8. The
limit of a prefill is the rate of a plain f32 product, measured in the same run. Calls take turns; medians are printed, and a JSON line.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script finds its own folder only

from benchmarks.rounds import interleaved, median_seconds, seconds
from kernels import experts
from model.config import MLPConfig
from model.mlp import activate

ROUNDS = flags.DEFINE_integer("rounds", 40, "Calls per case.")
TOP_K, SIDE = 2, 2048


def case(tokens: int, count: int, width: int, hidden: int):
    """A jitted call with random weights, a different choice of experts in every call."""
    rng = np.random.default_rng(0)
    w_in = jnp.asarray(rng.standard_normal((count, 2, hidden, width), np.float32))
    w_out = jnp.asarray(rng.standard_normal((count, width, hidden), np.float32))
    x = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    shares = jnp.full((tokens, TOP_K), 0.5)
    activation = functools.partial(activate, MLPConfig(hidden=hidden))
    call = jax.jit(lambda chosen: experts(x, chosen, shares, w_in, w_out, activation))

    def run() -> jax.Array:
        chosen = np.stack([rng.permutation(count)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
        return call(chosen)

    return run


def main(_: list[str]) -> None:
    matrix = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    calls = {
        f"{tokens} token{'s' * (tokens > 1)}, {count} experts of {width} x {hidden}": case(tokens, count, width, hidden)
        for tokens, width, hidden in ((1, 512, 1024), (1, 1024, 2048), (16, 512, 1024), (512, 512, 1024))
        for count in (8, 64)
    } | {"plain product": lambda: product(matrix, matrix)}
    records = interleaved({name: functools.partial(seconds, call) for name, call in calls.items()}, ROUNDS.value)
    medians = {name: median_seconds(record) for name, record in records.items()}
    rate = 2 * SIDE**3 / medians["plain product"]
    for name, median in medians.items():
        print(f"{name:42} {median * 1e3:8.2f} ms")
    for width, hidden in ((512, 1024), (1024, 2048)):
        few, many = (medians[f"1 token, {count} experts of {width} x {hidden}"] for count in (8, 64))
        print(f"1 token, {width} x {hidden}: 64 experts cost {many / few:.2f} times what 8 cost")
    reached = 2 * 512 * TOP_K * 3 * 512 * 1024 / medians["512 tokens, 8 experts of 512 x 1024"]
    print(f"512 tokens, 8 experts: {reached / 1e9:.0f} GFLOP/s, {reached / rate:.0%} of the plain product's {rate / 1e9:.0f}")
    print(json.dumps({"median_s": medians, "flop_per_s": rate}))


if __name__ == "__main__":
    app.run(main)
