"""Which kernels run a model: what JAX compiles, or those in C++ for CPUs."""

from kernels import cpu
from quantization import Scheme
from runtime import UserError

KERNELS = ("auto", "xla", "native")
ACTIVATIONS = ("auto", "float", "int8")


def choose_kernels(kernels: str, where: str, *, split: bool = False, layer_loop: str = "unrolled") -> tuple[str, str | None]:
    """ "xla" or "native", and what a user should be told about it.

    Args:
      kernels: one of `KERNELS`; "auto" is native where that runs.
      where: the platform.
      split: whether the model is split over a mesh.
      layer_loop: as of `load`.

    Raises:
      UserError: an unknown name, or native kernels where they do not run.
    """
    if kernels not in KERNELS:
        raise UserError(f"--kernels={kernels} is not known: use one of {', '.join(KERNELS)}")
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


def round_activations(activations: str, kernels: str, weights: str | Scheme) -> bool:
    """Whether native products with packed weights round their activations to 8 bits.

    Args:
      activations: one of `ACTIVATIONS`; "auto" rounds.
      kernels: as `choose_kernels` gives it.
      weights: as of `load`.

    Raises:
      UserError: an unknown name, or one that these kernels or weights can't follow.
    """
    if activations not in ACTIVATIONS:
        raise UserError(f"--activations={activations} is not known: use one of {', '.join(ACTIVATIONS)}")
    if activations == "float" and weights == "w8a8":
        raise UserError("--activations=float is not what --weights=w8a8 says: use --weights=int8")
    if activations == "int8" and kernels != "native" and weights != "w8a8":
        raise UserError("--activations=int8 needs native kernels, which do not run here: use --weights=w8a8, or leave it out")
    return kernels == "native" and activations != "float"
