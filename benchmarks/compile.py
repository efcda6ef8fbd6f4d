"""What it costs to compile a large model for a slice of TPUs, its layers unrolled and looped: seconds, code, and temporaries.

    pip install -e ".[tpu]"
    python benchmarks/compile.py --out=compile.json

Needs no TPU. Seconds are of this machine, with whatever else runs on it; bytes are exact.
"""

import json
import os
import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = flags.DEFINE_string("out", None, "Where to write the numbers as JSON.")
PROGRAMS = flags.DEFINE_list("programs", ["decode", "prefill"], "Which programs to compile.")
CASES = (("Llama-3.1-8B", "v5e:2x2"), ("Llama-3.1-70B", "v5e:4x4"))


def main(_: list[str]) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled"}
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from tests.aot.meshes import LLAMA_8B, LLAMA_70B, compiled_on

    configs = {"Llama-3.1-8B": LLAMA_8B, "Llama-3.1-70B": LLAMA_70B}
    print("| model | slice | program | layers | weights | seconds | code MiB | temporaries MiB | of the cache |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name, topology in CASES:
        devices = np.asarray(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
        for program in PROGRAMS.value:
            for layer_loop, auto in (("unrolled", False), ("scan", False), ("scan", True)):
                if auto and program == "prefill":
                    continue
                done = compiled_on(Mesh(devices, ("model",)), program, configs[name], layer_loop, auto=auto)
                memory = done.memory
                row = {
                    "model": name,
                    "slice": topology,
                    "program": program,
                    "layer_loop": layer_loop,
                    "weights": "as the compiler wants" if auto else "row-major",
                    "seconds": done.seconds,
                    "code_bytes": memory.generated_code_size_in_bytes,
                    "temporary_bytes": memory.temp_size_in_bytes,
                    "cache_bytes": done.cache_bytes,
                }
                rows.append(row)
                mib = [row[key] / 2**20 for key in ("code_bytes", "temporary_bytes")]
                part = row["temporary_bytes"] / row["cache_bytes"]
                first = f"| {name} | {topology} | {program} | {layer_loop} | {row['weights']} "
                print(f"{first}| {row['seconds']:.1f} | {mib[0]:.1f} | {mib[1]:.1f} | {part:.1%} |", flush=True)
    if OUT.value is not None:
        Path(OUT.value).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
