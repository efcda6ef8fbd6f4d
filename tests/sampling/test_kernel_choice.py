"""Which kernels are taken, and what they are told about activations."""

import jax.numpy as jnp
import pytest

from kernels import cpu
from quantization import SCHEMES
from runtime import UserError
from sampling.kernel_choice import activation_bits, choose_kernels

F32, W8A8, INT8 = jnp.dtype(jnp.float32), SCHEMES["w8a8"], SCHEMES["int8"]


def test_one_cpu_has_native_kernels_and_nothing_else(monkeypatch):
    monkeypatch.setattr(cpu, "reason", lambda: None)
    assert choose_kernels("auto", "cpu") == choose_kernels("native", "cpu") == ("native", None)
    others = [choose_kernels("auto", "tpu"), choose_kernels("auto", "cpu", split=True), choose_kernels("auto", "cpu", layer_loop="scan")]
    assert [*others, choose_kernels("xla", "cpu")] == [("xla", None)] * 4


def test_where_they_are_not_built_a_notice_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "reason", lambda: "not built")
    kernels, notice = choose_kernels("auto", "cpu")
    assert kernels == "xla" and "not built" in notice
    with pytest.raises(UserError, match=r"--kernels=native can't run \(not built\): use --kernels=auto"):
        choose_kernels("native", "cpu")


@pytest.mark.parametrize(
    ("where", "more", "line"),
    [("gpu", {}, "for CPUs"), ("cpu", {"split": True}, "leave out --mesh"), ("cpu", {"layer_loop": "scan"}, "leave out --layer_loop")],
)
def test_native_kernels_where_they_do_not_run_are_refused(where, more, line):
    with pytest.raises(UserError, match=line):
        choose_kernels("native", where, **more)


def test_activations_follow_the_flag_and_the_weights():
    assert [activation_bits(each, "native", F32, F32) for each in ("auto", "float", "int16", "int8")] == [15, 0, 15, 8]
    assert activation_bits("auto", "native", "native", INT8) == 8 and activation_bits("int16", "native", "native", "native") == 15
    assert activation_bits("auto", "xla", F32, F32) == activation_bits("int8", "xla", W8A8, W8A8) == 0
    assert activation_bits("int8", "native", W8A8, INT8) == 8


@pytest.mark.parametrize(
    ("activations", "kernels", "formats", "line"),
    [
        ("int4", "native", (F32,), "use one of auto, float, int16, int8"),
        ("float", "native", (W8A8, W8A8), "not what w8a8 weights say"),
        ("int16", "native", (INT8, W8A8), "not what w8a8 weights say"),  # the head alone
        ("int8", "xla", (INT8, INT8), "needs native kernels"),
        ("int8", "xla", (W8A8, INT8), "needs native kernels"),
    ],
)
def test_what_can_not_be_followed_is_refused(activations, kernels, formats, line):
    with pytest.raises(UserError, match=line):
        activation_bits(activations, kernels, *formats)
