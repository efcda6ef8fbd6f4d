"""A run of several processes: how this one finds its place, and what all of them must have been given alike."""

import contextlib
import dataclasses
import math
import os
import signal
import sys
from typing import Any

from command import flags
from command.checks import is_given
from runtime import UserError
from runtime.terminal import Interrupt, own_stdout, to_json
from runtime.virtual import runs_on_cpu, virtual_devices
from sharding import parse_mesh
from sharding.processes import Processes, connect


def mesh_settings() -> tuple[dict[str, int] | None, Processes]:
    """The mesh's sizes, if there is to be one, and this process among those of the run, which it has joined.

    The CPU's devices are made before JAX is imported, and processes meet before it counts them.
    """
    sizes = None if flags.MESH.value is None else parse_mesh(flags.MESH.value)
    several = any(map(is_given, flags.PROCESS_FLAGS))
    if sizes is not None and runs_on_cpu():
        count = flags.NUM_PROCESSES.value
        if count is None:  # as the cluster says; of others than these, JAX knows only once it is imported
            count = int(os.environ.get("SLURM_NTASKS") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1) if flags.DISTRIBUTED.value else 1
        product = math.prod(sizes.values())
        if count < 1 or product % count:
            wrong = f"--mesh={flags.MESH.value} is of {product} devices, which {count} processes can't share"
            raise UserError(f"{wrong}: give a multiple of {count}")
        virtual_devices(product // count)
    if not several:
        return sizes, Processes()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = connect(flags.COORDINATOR.value, flags.NUM_PROCESSES.value, flags.PROCESS_ID.value)
    own_stdout(speaks=processes.first)
    return sizes, processes


def agree(processes: Processes, requests: list[Any]) -> Any:
    """Ends all processes if they were given different work: their programs would wait for each other for ever. Returns where a load may
    report."""
    import jax

    import checkpoint

    progress = checkpoint.Progress(None if processes.first else sys.stdout)
    named = {f"--{flag.name}": flag.value for group in flags.HELP.values() for flag in group if flag.name not in flags.OWN}
    files = {f"--{flag.name}": flag.value is not None for flag in (flags.OUT, flags.PROMPT_FILE)}  # they decide what is run
    # As bytes: an error need not show them.
    prompts = to_json([[request.prompt, request.options] for request in requests], "ascii").encode()
    processes.agree(**named, **files, **{"the prompts": prompts, "JAX's version": jax.__version__})
    files = checkpoint.fingerprint(checkpoint.resolve(flags.MODEL.value, progress=progress))
    processes.agree(**{"the model's files": files}, timeout_s=3600)  # a download of another process may take long
    return progress


def with_seeds(requests: list[Any], seed: int) -> list[Any]:
    """Those that have none get one from `seed`, each its own."""
    seeds = [(seed + index) % 2**32 for index in range(len(requests))]
    return [
        dataclasses.replace(request, options=request.options | {"seed": own})
        if request.options.get("seed", flags.SEED.value) is None
        else request
        for request, own in zip(requests, seeds, strict=True)
    ]


def interruption(processes: Processes) -> contextlib.AbstractContextManager[Interrupt]:
    """Ctrl-C as a question; where there are several processes it ends this one instead, as they would not all ask at the same step."""
    return Interrupt() if processes.count == 1 else contextlib.nullcontext(Interrupt())
