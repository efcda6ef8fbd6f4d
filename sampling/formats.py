"""The names of weight formats, as `--weights` and `--head_weights` take them."""

import dataclasses

import jax.numpy as jnp

from checkpoint import How
from quantization import GROUPS, SCHEMES, Scheme
from runtime import DTYPES, UserError, resolve_dtype

AS_STORED = ("auto", "native")
# A scale per row costs int8 twice the divergence that one per 64 inputs does, for 0.8 % of the bytes less.
NAMED = {"int8": Scheme("int8", 64, or_rows=True), **{name: SCHEMES[name] for name in ("w8a8", "int4", "fp8")}}
GROUPED = ("int8", "int4")
WEIGHTS = (*AS_STORED, *DTYPES, *NAMED)
WITH_HEAD = {"int4": "int8"}  # what embedding and head become by default: at 4 bits they would cost most of the quality


def weight_formats(
    weights: str | Scheme = "auto",
    head: str | Scheme = "auto",
    group: int | None = None,
    where: str = "cpu",
    kernels: str = "xla",
) -> tuple[jnp.dtype, How, How]:
    """What `checkpoint.load` takes.

    Args:
      weights: one of `WEIGHTS`, or a scheme.
      head: of embedding and head, likewise; "auto" follows `weights`, but int8 goes with int4.
      group: inputs that share a scale at int4 and int8; None: 64 (at int8 whole rows where that does not divide them).
      where: the platform, which "auto" goes by.
      kernels: "native" makes "auto" "native".

    Returns:
      The dtype of what is not packed, how the layers' matrices are kept, and how embedding and head are.

    Raises:
      UserError: an unknown name or group, or a group for a format without.
    """
    if group is not None and weights not in GROUPED:
        raise UserError(f"--weights_group={group} is of weights whose scales are of groups: add --weights={' or '.join(GROUPED)}")
    if group is not None and group not in GROUPS:
        raise UserError(f"--weights_group={group} is not supported: use one of {', '.join(map(str, GROUPS))}")
    if kernels == "native" and weights == "auto":
        weights = "native"
    layers = _format("weights", weights)
    if isinstance(layers, Scheme) and group is not None:
        layers = dataclasses.replace(layers, group=group, or_rows=False)
    follows = NAMED[WITH_HEAD[weights]] if weights in WITH_HEAD else layers
    tail = follows if head == "auto" else _format("head_weights", head)
    plain = weights if weights in DTYPES else "auto"
    return resolve_dtype("weights", plain, where), layers, tail


def _format(flag: str, name: str | Scheme) -> How:
    if isinstance(name, Scheme) or name in AS_STORED:
        return name
    if name in DTYPES:
        return jnp.dtype(DTYPES[name])
    if name not in NAMED:
        raise UserError(f"--{flag}={name} is not known: use one of {', '.join(WEIGHTS)}")
    return NAMED[name]
