"""What the names of weight formats stand for."""

import jax.numpy as jnp
import pytest

from quantization import SCHEMES, Scheme
from runtime import UserError
from sampling.formats import weight_formats

INT8 = Scheme("int8", 64, or_rows=True)
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, (F32, "auto", "auto")),
        ({"where": "tpu"}, (BF16, "auto", "auto")),
        ({"weights": "native"}, (F32, "native", "native")),
        ({"kernels": "native"}, (F32, "native", "native")),
        ({"weights": "bf16"}, (BF16, BF16, BF16)),
        ({"weights": "int8"}, (F32, INT8, INT8)),
        ({"weights": "int4"}, (F32, SCHEMES["int4"], INT8)),
        ({"weights": "int8", "group": 32}, (F32, Scheme("int8", 32), Scheme("int8", 32))),
        ({"weights": "int4", "group": 32, "head": "bf16"}, (F32, Scheme("uint4", 32, symmetric=False), BF16)),
        ({"weights": "w8a8", "head": "native", "where": "gpu"}, (BF16, SCHEMES["w8a8"], "native")),
        ({"weights": Scheme("uint3", 64)}, (F32, Scheme("uint3", 64), Scheme("uint3", 64))),
    ],
)
def test_a_name_is_a_dtype_and_two_formats(arguments, found):
    assert weight_formats(**arguments) == found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"weights": "int3"}, "--weights=int3 is not known: use one of auto, native, "),
        ({"head": "int5"}, "--head_weights=int5 is not known"),
        ({"weights": "w8a8", "group": 32}, "--weights_group=32 is of weights whose scales are of groups: add --weights=int8 or int4"),
        ({"weights": "int4", "group": 48}, "--weights_group=48 is not supported: use one of 32, 64, 128"),
    ],
)
def test_what_is_not_known_is_refused(arguments, line):
    with pytest.raises(UserError, match=line):
        weight_formats(**arguments)
