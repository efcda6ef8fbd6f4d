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
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script finds its own folder only

from benchmarks.kernel_cases import TOP_K, mixture
from benchmarks.rounds import interleaved, median_seconds, seconds

ROUNDS = flags.DEFINE_integer("rounds", 40, "Calls per case.")
SIDE = 2048


def main(_: list[str]) -> None:
    matrix = jnp.ones((SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    calls = {
        f"{tokens} token{'s' * (tokens > 1)}, {count} experts of {width} x {hidden}": mixture(tokens, count, width, hidden)
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
