"""Law 6 for every kind of cache, as the TPU compiler sees it: what is kept x where it lies x in what numbers, and both programs.

Caches are so large that the vector memory (128 MiB) can't take any but the arrays of scales, and temporaries are compared with all of the
cache: a copy of one array, even of scales, would be more.
"""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

import kv
from tests.aot.programs import BATCH, CHUNK, attention, compiled, deepseek

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"),
]

CAPACITY = 131072
DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
KEPT = {
    "8 heads": attention(),
    "3 heads of 64": attention(num_kv_heads=3, head_dim=64),
    "a window": attention(window=32768),
    "latent": deepseek(sparse=False),
    "sparse": deepseek(sparse=True),
}
BOTH, DECODE = ("decode", "prefill"), ("decode",)
KINDS = [
    *(("8 heads", None, dtype, BOTH) for dtype in DTYPES),
    *(("8 heads", 64, dtype, BOTH) for dtype in ("bf16", "int8")),
    *(("8 heads", 16, dtype, BOTH) for dtype in ("bf16", "int4")),
    ("8 heads", 16, "fp8", DECODE),
    *(("3 heads of 64", None, dtype, BOTH) for dtype in ("bf16", "int8")),
    ("3 heads of 64", 16, "int4", BOTH),
    *(("a window", None, dtype, BOTH) for dtype in ("bf16", "int8")),
    ("a window", None, "int4", DECODE),
    ("a window", 64, "bf16", BOTH),
    *(("latent", None, dtype, BOTH) for dtype in ("bf16", "int8")),
    ("latent", None, "int4", DECODE),
    ("latent", 64, "bf16", BOTH),
    ("latent", 16, "int8", BOTH),
    ("sparse", None, "int8", DECODE),
    ("sparse", 64, "bf16", BOTH),
]


def assert_in_place(compiled, scores: int = 0) -> None:
    """`scores`: f32 numbers that the program has to hold besides."""
    assert compiled.nbytes <= compiled.aliased < 1.001 * compiled.nbytes + 2**20  # not padded; and decode's small state
    assert compiled.temporaries < 0.02 * compiled.nbytes + 4 * scores
    assert compiled.copies == []


@pytest.mark.parametrize(
    ("kept", "page_size", "dtype", "program"),
    [
        pytest.param(kept, page_size, dtype, program, id=f"{kept}-{f'pages of {page_size}' if page_size else 'rows'}-{dtype}-{program}")
        for kept, page_size, dtype, programs in KINDS
        for program in programs
    ],
)
def test_a_program_writes_to_the_cache_in_place_and_the_cache_is_not_padded(chip, kept, page_size, dtype, program):
    format = kv.Format.for_platform("tpu", DTYPES[dtype], page_size=page_size)
    # With more slots than this, a chunk's queries gather the rows of their choice one by one, CHUNK * top_k of them at once.
    capacity = 32768 if kept == "sparse" and program == "prefill" else CAPACITY
    queries = {"decode": BATCH, "prefill": CHUNK}[program] if kept == "sparse" else 0
    assert_in_place(compiled(program, chip, KEPT[kept], capacity, format), scores=4 * queries * capacity)


@pytest.mark.parametrize(
    ("kept", "page_size", "dtype"),
    [("8 heads", None, "bf16"), ("8 heads", None, "int4"), ("a window", None, "bf16"), ("latent", None, "int8"), ("8 heads", 16, "int8")],
)
def test_a_prefill_of_some_rows_writes_in_place(chip, kept, page_size, dtype):
    format = kv.Format.for_platform("tpu", DTYPES[dtype], page_size=page_size)
    assert_in_place(compiled("prefill", chip, KEPT[kept], CAPACITY, format, rows=3))


def test_a_copy_of_the_cache_would_be_found(chip):
    format = kv.Format(DTYPES["int8"], "SKH", "SKH")  # whose scales, 4 to a head, the compiler lays out anew to write to them
    program = compiled("decode", chip, KEPT["8 heads"], CAPACITY, format)
    assert program.copies != []
    assert program.temporaries > 0.02 * program.nbytes
