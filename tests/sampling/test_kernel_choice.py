"""Which kernels are taken, and what they are told about activations."""

import dataclasses

import jax.numpy as jnp
import pytest

import kv
from kernels import cpu
from quantization import SCHEMES
from runtime import UserError
from sampling import cache_format
from sampling.kernel_choice import activation_bits, choose_kernels
from sampling.language_model import not_by_pallas

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


def test_pallas_is_taken_where_it_is_asked_for_only_and_refused_on_a_cpu():
    more = {"split": True, "layer_loop": "scan"}
    assert choose_kernels("pallas", "tpu") == choose_kernels("pallas", "gpu") == ("pallas", None)
    for each in ({"split": True}, {"layer_loop": "scan"}):
        kernels, notice = choose_kernels("pallas", "tpu", **each)
        assert kernels == "pallas" and "products are XLA's" in notice
    assert choose_kernels("auto", "tpu") == choose_kernels("auto", "gpu", **more) == ("xla", None)
    with pytest.raises(UserError, match="--kernels=pallas is for TPUs and GPUs, and this runs on cpu: use --kernels=auto"):
        choose_kernels("pallas", "cpu")


@pytest.mark.parametrize(("where", "lanes"), [("tpu", 128), ("gpu", None)])
def test_a_cache_for_pallas_is_plain_and_says_so(where, lanes):
    format = cache_format("auto", where=where, kernels="pallas")
    assert (format.kernels, format.dtype, format.lanes, format.interpret) == ("pallas", jnp.bfloat16, lanes, False)
    with pytest.raises(UserError, match="--kernels=pallas reads a KV cache of f32 or bf16, not int8: use --kv=bf16, or --kernels=auto"):
        cache_format("int8", where=where, kernels="pallas")


def test_a_user_is_told_of_layers_that_pallas_does_not_answer():
    latent = kv.LatentSpec(latent_dim=512, rope_dim=64)
    plain, odd = (kv.LayerSpec(num_kv_heads=2, key_dim=width, value_dim=width) for width in (128, 80))

    @dataclasses.dataclass(frozen=True)
    class Layers:
        cache_layers: tuple

    def told(where, *layers, **more):
        return not_by_pallas(Layers(layers), cache_format("auto", where=where, kernels="pallas", **more), None)

    assert told("tpu", plain, plain) == told("gpu", plain, odd) == []
    assert told("tpu", latent, plain, odd, odd) == [
        "1 of 4 layers are not read by Pallas kernels (latent attention)",
        "2 of 4 layers are not read by Pallas kernels (heads of 80 and 80 numbers do not fill rows of 128)",
    ]
    [line] = told("tpu", plain, cache="paged", page_size=4)
    assert "numbers in pages of 4 do not fill" in line
    assert not_by_pallas(Layers((latent,)), cache_format("auto", where="tpu"), None) == []


def test_activations_follow_the_flag_and_the_weights():
    assert [activation_bits(each, "native", F32, F32) for each in ("auto", "float", "int16", "int8")] == [8, 0, 15, 8]
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
