"""Which kernels run a model: what JAX compiles, those in C++ for CPUs, or Pallas' on TPUs and GPUs."""

from checkpoint import How
from kernels import cpu
from quantization import Scheme
from runtime import UserError

KERNELS = ("auto", "xla", "native", "pallas")
ACTIVATIONS = ("auto", "float", "int16", "int8")


def choose_kernels(kernels: str, where: str, *, split: bool = False, layer_loop: str = "unrolled") -> tuple[str, str | None]:
    """The kernels, "xla", "native" or "pallas", and what a user should be told about them.

    Args:
      kernels: one of `KERNELS`; "auto" is native where that runs, else xla: no chip has run the Pallas kernels yet.
      where: the platform.
      split: whether the model is split over a mesh.
      layer_loop: as of `load`.

    Raises:
      UserError: an unknown name, or kernels where they do not run.
    """
    if kernels not in KERNELS:
        raise UserError(f"--kernels={kernels} is not known: use one of {', '.join(KERNELS)}")
    if kernels == "pallas":
        if where not in ("tpu", "gpu"):
            raise UserError(f"--kernels=pallas is for TPUs and GPUs, and this runs on {where}: use --kernels=auto")
        if split or layer_loop != "unrolled":
            return "pallas", "with --mesh or --layer_loop=scan products are XLA's, and attention alone is Pallas'"
        return "pallas", None
    if kernels == "xla" or (kernels == "auto" and (where != "cpu" or split or layer_loop != "unrolled")):
        return "xla", None
    if where != "cpu":
        raise UserError(f"--kernels=native is for CPUs, and this runs on {where}: use --kernels=auto")
    if split or layer_loop != "unrolled":
        raise UserError(f"--kernels=native runs on one device, layer by layer: leave out {'--mesh' if split else '--layer_loop'}")
    if (reason := cpu.reason()) is None:
        return "native", None
    if kernels == "native":
        raise UserError(f"--kernels=native can't run ({reason}): use --kernels=auto")
    return "xla", f"without native kernels, which are several times as fast: {reason}"


def activation_bits(activations: str, kernels: str, *formats: How) -> int:
    """To how many bits native products with packed weights round their activations: 8, 15, or 0 for not at all.

    Args:
      activations: one of `ACTIVATIONS`; "auto" is int8, of which groups of 32 with an outlier have 15 bits; so have all of int16.
      kernels: as `choose_kernels` gives it.
      formats: of the weights, as `weight_formats` gives them. Those that say so themselves are multiplied with 8 bits in any case.

    Raises:
      UserError: an unknown name, or one that these kernels or weights can't follow.
    """
    if activations not in ACTIVATIONS:
        raise UserError(f"--activations={activations} is not known: use one of {', '.join(ACTIVATIONS)}")
    rounding = [isinstance(how, Scheme) and how.activations is not None for how in formats]
    if activations in ("float", "int16") and any(rounding):
        raise UserError(f"--activations={activations} is not what w8a8 weights say: use int8 ones, or leave it out")
    if activations in ("int16", "int8") and kernels != "native" and not all(rounding):
        raise UserError(f"--activations={activations} needs native kernels, which do not run here: leave it out, or use --weights=w8a8")
    return {"auto": 8, "float": 0, "int16": 15, "int8": 8}[activations] if kernels == "native" else 0
