"""`--task=quantize`: a model's folder, packed."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp

from quantization import Scheme, quantize
from quantization.schemes import BITS
from runtime import UserError
from runtime.corpus import corpus
from sampling.formats import weight_formats
from sampling.language_model import LanguageModel
from sampling.quantize import METHODS, quantize_model
from sampling.requests import read_text

UNFINISHED = ".layers"  # the folder of finished layers stands beside the new one, under its name and this


def scheme_of(bits: int, group: int | None, symmetric: bool) -> Scheme:
    """What `--bits`, `--group` and `--symmetric` say.

    Args:
      bits: 3, 4 or 8.
      group: inputs that share a scale, a multiple of 32, or 0 for whole rows; None: 64, at 8 bits whole rows.
      symmetric: no zeros of their own for groups.

    Raises:
      UserError: other bits, another group, or zeros at 8 bits.
    """
    if bits not in BITS:
        raise UserError(f"--bits={bits} is not supported: use 3, 4 or 8")
    if group is None:
        group = 0 if bits == 8 else 64
    if group < 0 or group % 32:
        raise UserError(f"--group={group} is no multiple of 32: use 32, 64 or 128, or 0 for whole rows")
    if bits == 8 and not symmetric:
        raise UserError("--nosymmetric is of fewer bits: at --bits=8 zeros gain nothing; leave it out, or give --bits=4")
    return Scheme(BITS[bits], group or None, symmetric=symmetric)


def pack_model(
    lm: LanguageModel,
    out: str | os.PathLike[str],
    method: str,
    scheme: Scheme,
    *,
    calibration: str | None = None,
    act_order: bool = False,
    head: str = "auto",
    steps: int | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, seconds_left: None,
) -> LanguageModel:
    """Packs a model and writes it as a folder, which `load` reads packed. Layers that are done are kept beside it until all are: the same
    call again goes on from them.

    Args:
      lm: with plain weights, on one device.
      out: a new folder.
      method: see `quantize_model`.
      calibration: a UTF-8 text file; None: the committed calibration half.
      act_order, steps, progress: see `quantize_model`.
      head: the format of embedding and head, as of `load`; "auto": int8.

    Raises:
      UserError: see `quantize_model`, `weight_formats` and `LanguageModel.save`; the text can't be read.
    """
    if method not in METHODS:
        raise UserError(f"--method={method} is not known: use one of {', '.join(METHODS)}")
    tokens = None
    if method != "rtn":
        text = corpus("calibration") if calibration is None else read_text(calibration)
        tokens = lm.tokenizer.encode(text, add_bos=False, add_eos=False)
    out, (_, _, tail) = Path(out), weight_formats(head="int8" if head == "auto" else head)
    unfinished = out.with_name(out.name + UNFINISHED)
    began = time.perf_counter()
    packed = quantize_model(lm, method, scheme, tokens, act_order=act_order, steps=steps, out_state=unfinished, progress=progress)
    for name in {"embedding", "head"} & packed.keys():
        packed[name] = quantize(packed[name], tail) if isinstance(tail, Scheme) else packed[name].astype(_plain(tail))
    done = dataclasses.replace(lm, params=packed, load_seconds=time.perf_counter() - began)
    done.save(out)
    shutil.rmtree(unfinished, ignore_errors=True)
    return done


def _plain(tail: object) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if isinstance(tail, str) else tail
