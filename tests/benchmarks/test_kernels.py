"""The kernels' benchmark on small shapes: what is counted, that the numbers of the report fit together, and what bounds a run."""

import json
import pathlib
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_attention, kernel_cases, kernel_page, kernel_run, machine
from benchmarks.device_ceilings import DeviceCeilings
from benchmarks.kernel_cases import CODES, Case, Group, copies_of, cycled, kernels_here
from benchmarks.rounds import interleaved
from kernels import matmul
from runtime import UserError

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "kernels.py"
READ, PRODUCT = 1e9, 1e10  # bytes and FLOPs per second that the pretended machine can do


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Other work on this machine must not decide which measurements count; two copies of a small matrix are enough."""
    monkeypatch.setattr(machine, "_busy_seconds", lambda: None)
    monkeypatch.setattr(machine, "cache_bytes", lambda: 4096)
    monkeypatch.setattr(kernel_cases, "MATRICES", {"tiny": {"qkv": (48, 64), "head": (80, 64)}})


def meter(*reads):
    """Ceilings that answer with the given bandwidths in turn, then with the last of them."""
    left = list(reads or [READ])
    ask = lambda request: {"read_bytes_per_s": left.pop(0) if len(left) > 1 else left[0], "matmul_flop_per_s": PRODUCT}  # noqa: E731
    return types.SimpleNamespace(ask=ask, hello={"how": "guessed"})


def pretended(name, bytes_=1e6, flops=1e6, op="matmul", **seconds):
    """A group of one case whose kernels say that they took the given seconds, call by call: the first is the warm-up."""
    left = {kernel: iter(each) for kernel, each in seconds.items()}
    calls = {kernel: lambda times=times: next(times) for kernel, times in left.items()}
    return Group(op, name, lambda: [Case(op, name, calls, bytes_, flops)])


def test_limits_ratios_and_shares_follow_from_medians_and_the_highest_ceilings():
    slow, wide = (
        pretended("wide", 4e6, 1e6, native=[9, 1, 2, 3], xla=[9, 6, 8, 7]),
        pretended("deep", 1e6, 5e8, op="norm", xla=[9, 1, 1, 1]),
    )
    report = kernel_run.measure([slow, wide], meter(READ / 2, READ), rounds=3, budget_seconds=60)
    first, second = report["results"]
    assert (first["limit_s"], first["bound"]) == (4e6 / READ, "reading")
    assert {name: kernel["seconds"]["median"] for name, kernel in first["kernels"].items()} == {"native": 2, "xla": 7}
    assert {name: kernel["reached"] for name, kernel in first["kernels"].items()} == {"native": 0.004 / 2, "xla": 0.004 / 7}
    assert first["xla_to_native"] == 3.5
    assert (second["limit_s"], second["bound"], second["xla_to_native"]) == (5e8 / PRODUCT, "arithmetic", None)
    assert report["ceilings"]["read_bytes_per_s"]["all"] == [READ / 2, READ]
    assert report["notes"] == []


def test_the_report_is_json_and_its_page_has_every_row():
    report = kernel_run.measure([pretended("wide", native=[9, 2e-6], xla=[9, 5e-6]), pretended("alone", xla=[9, 1e-3])], meter(), 1, 60)
    again = json.loads(json.dumps(report))
    assert again == report
    assert set(report) == {"machine", "settings", "ceilings", "results", "notes"}
    assert report["settings"] == {"rounds": 1, "budget_seconds": 60, "platform": "cpu"}
    for result in report["results"]:
        assert set(result) == {"op", "shape", "bytes", "flops", "limit_s", "bound", "kernels", "xla_to_native"}
        for kernel in result["kernels"].values():
            assert set(kernel) == {"seconds", "reached", "disturbed"}
            assert set(kernel["seconds"]) == {"median", "min", "max", "all"}
    page = kernel_page.markdown(again)
    assert "| wide | 1.00 MB | 1.00 MFLOP | 1000 (reading) | 2.00 | 50000% | 5.00 | 20000% | 2.50 |" in page
    assert "| alone | 1.00 MB | 1.00 MFLOP | 1000 (reading) | - | - | 1000 | 100% | - |" in page


def test_past_its_share_a_group_has_one_round_and_past_the_budget_no_other_begins():
    def slow():
        time.sleep(0.05)
        return 1.0

    def group(name):
        return Group("matmul", name, lambda: [Case("matmul", name, {"xla": slow}, 1.0, 1.0)])

    report = kernel_run.measure([group("first"), group("second"), group("third")], meter(), rounds=1000, budget_seconds=0.02)
    assert [len(result["kernels"]["xla"]["seconds"]["all"]) for result in report["results"]] == [1]
    left_out, cut = report["notes"]
    assert "left out second, third" in left_out
    assert "cut the rounds of 1" in cut


def test_past_a_deadline_interleaved_calls_have_one_round():
    record = interleaved({"it": lambda: 1.0}, 50, deadline=time.perf_counter() - 1)["it"]
    assert len(record.measurements) == 1


def test_arguments_take_turns_so_that_none_is_still_in_the_cache():
    seen = []
    call = cycled(seen.append, [("a",), ("b",), ("c",)], operations=2, dispatches=2)
    assert call() > 0
    call()
    assert seen == ["a", "b", "c", "a"]


@pytest.mark.parametrize(("nbytes", "copies"), [(1, 8192), (4096, 2), (5000, 2), (8192, 1), (10**9, 1)])
def test_copies_are_twice_as_large_as_the_cache(nbytes, copies):
    assert copies_of(nbytes) == copies


@pytest.mark.parametrize("code", CODES)
def test_a_product_must_read_its_weights_and_do_two_operations_for_each_and_row(code):
    rows = (1, 32, 128)
    cases = kernel_cases.products("tiny", "qkv", code, rows)
    weight = kernel_cases.packed(48, 64, code)
    assert [case.flops for case in cases] == [2 * 48 * 64 * count for count in rows]
    assert [case.bytes for case in cases] == [weight.nbytes + 4 * count * (48 + 64) for count in rows]
    for case in cases:
        assert set(case.calls) == set(kernels_here())
        assert all(0 < call() < 60 for call in case.calls.values())


@pytest.mark.parametrize("code", CODES)
def test_what_is_timed_multiplies_the_same_weights(code):
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    exact = x.astype(np.float64) @ np.asarray(kernel_cases.packed(48, 64, code).widen(), np.float64).T
    for copies in kernel_cases.weights(48, 64, code).values():
        # Activations of native products have 8 bits of the largest of 32: an error of half a step, a 254th of it, in each of 64 terms.
        largest = 64 * np.abs(x).max() * np.abs(np.asarray(copies[0].widen())).max()
        np.testing.assert_allclose(matmul(jnp.asarray(x), copies[-1]), exact, rtol=0, atol=largest / 254)


def test_the_head_has_no_more_rows_than_a_decode_step():
    assert [case.shape for case in kernel_cases.products("tiny", "head", "u8", (1, 32, 128))] == [
        "tiny head u8, 1 row",
        "tiny head u8, 32 rows",
    ]


def test_a_fused_product_moves_its_norm_and_residual_too():
    plain, fused = (kernel_cases.products("tiny", "qkv", "u4", (8,), op)[0] for op in ("matmul", "fused"))
    assert fused.bytes - plain.bytes == 4 * 64 + 4 * 8 * 48
    assert all(call() > 0 for call in fused.calls.values())


@pytest.mark.parametrize("layout", kernel_attention.LAYOUTS)
def test_attention_counts_what_queries_see(layout, monkeypatch):
    heads = kernel_attention.Heads("tiny", 4, 2, 8, 16 if layout == "ring" else None)
    monkeypatch.setattr(kernel_attention, "LAYOUTS", {layout: heads})
    step, prefill = kernel_attention.attention(layout, "bf16", held=(300,), prompts=(40,))
    held, token, row = (
        300 if layout != "ring" else 16,
        2 * 2 * 8 * 2,
        4 * 2 * 4 * 8,
    )  # bytes of a key with its value, of a query with its answer
    assert step.bytes == token * (held + 1) + row
    assert prefill.bytes == (token + row) * 40
    seen = sum(range(1, 41)) if layout != "ring" else sum(range(1, 17)) + 24 * 16
    assert step.flops == 4 * 4 * 8 * (301 if layout != "ring" else 16)
    assert prefill.flops == 4 * 4 * 8 * seen
    for case in (step, prefill):
        assert set(case.calls) == set(kernels_here())
        assert all(call() > 0 for call in case.calls.values())


def test_everything_else_counts_what_it_must_move():
    (norm,) = kernel_cases.norms(32, (8,))
    assert norm.bytes == 4 * (2 + 2) * 8 * 32  # two read, two written
    (one, many) = kernel_cases.appends(512, (1, 4))
    assert [one.bytes, many.bytes] == [2 * 4 * count * 3 * 64 for count in (1, 4)]
    drawn = kernel_cases.samplings(97, (2,), steps=1)
    assert len(drawn) == 5
    assert {case.bytes for case in drawn} == {4 * 2 * 97}
    token, prompt = kernel_cases.mixtures(4, 32, 64, (1, 64))
    one_expert = 4 * 3 * 32 * 64
    assert token.bytes == pytest.approx(2 * one_expert + 2 * 4 * 32)
    assert prompt.bytes == pytest.approx(4 * one_expert + 2 * 4 * 32 * 64)  # all of them, but for one in 2^64
    assert prompt.flops == 2 * 64 * 2 * 3 * 32 * 64
    for case in (norm, one, many, *drawn, token, prompt):
        assert set(case.calls) == {"xla"}
        assert case.calls["xla"]() > 0


def test_a_device_measures_itself():
    device = DeviceCeilings(read_bytes=1 << 20, side=64)
    ceilings = device.ask({"op": "ceilings"})
    assert set(ceilings) == {"read_bytes_per_s", "matmul_flop_per_s"}
    assert all(0 < value < 1e18 for value in ceilings.values())
    assert "1 MiB" in device.hello["how"]


def test_all_operations_have_groups_and_others_are_refused():
    assert list(dict.fromkeys(group.op for group in kernel_run.groups(kernel_run.OPS))) == list(kernel_run.OPS)
    assert {group.op for group in kernel_run.groups(["norm", "append"])} == {"norm", "append"}
    with pytest.raises(UserError, match="'sort', which is not known: use some of matmul"):
        kernel_run.groups(["sort"])
    with pytest.raises(UserError, match="no operation is named"):
        kernel_run.groups([])


def test_the_script_writes_its_table_and_its_numbers(tmp_path):
    command = [sys.executable, str(SCRIPT), "--ops=append,norm", "--rounds=1", f"--out={tmp_path / 'new'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path)
    report = json.loads((tmp_path / "new" / "kernels.json").read_text())
    assert {result["op"] for result in report["results"]} == {"append", "norm"}
    assert done.stdout == (tmp_path / "new" / "kernels.md").read_text() == kernel_page.markdown(report)
    refused = subprocess.run([sys.executable, str(SCRIPT), "--ops=sort"], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "'sort'" in refused.stderr
