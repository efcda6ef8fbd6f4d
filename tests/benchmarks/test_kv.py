"""The KV benchmark's logic: fits, sums, ratios, what is asked of a tiny model, and the page."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
import sampling
from benchmarks import curves, kv_cost, kv_page, kv_parts, kv_peers, kv_plot, kv_quality, machine, stacks
from benchmarks.decoding import Decoding, filled
from benchmarks.rounds import interleaved, median_seconds
from model import Transformer
from runtime import UserError

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "kv.py"
FAKE = pathlib.Path(__file__).parent / "fake_worker.py"
F32, BF16 = kv.Format(), kv.Format(np.dtype(jnp.bfloat16), as_bits=True)
FORMATS = {"f32": F32, "bf16": BF16}
CEILINGS = {"read_bytes_per_s": {"median": 2e9, "min": 1e9, "max": 4e9, "all": [1e9, 2e9, 4e9]}, "how": "guessed"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Other work on this machine must not decide which measurements count."""
    monkeypatch.setattr(machine, "_busy_seconds", lambda: None)


@pytest.fixture(scope="module")
def lm(tiny_config, tiny_params):
    tokenizer = types.SimpleNamespace(
        vocab_size=101, adds_bos=False, encode=lambda text, **_: [byte % 101 for byte in text[:200].encode("utf-8")]
    )
    return sampling.LanguageModel("tiny", Transformer(tiny_config), tiny_params, tokenizer, kv_format=F32)


def test_a_fit_finds_the_line_and_how_much_it_explains():
    line = curves.fit([1, 2, 3], [5.0, 7.0, 9.0])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2.0, 3.0, 1.0))
    bent = curves.fit([0, 1, 2], [0.0, 3.0, 0.0])
    assert (bent.slope, bent.intercept, bent.r_squared) == pytest.approx((0.0, 1.0, 0.0), abs=1e-12)
    part = curves.fit([0, 1, 2, 3], [0.0, 1.0, 1.0, 2.0])  # residuals .1 .1 .. : 0.2 of a variance of 2
    assert (part.slope, part.intercept, part.r_squared) == pytest.approx((0.6, 0.1, 0.9))


def test_a_flat_line_explains_nothing():
    assert np.isnan(curves.fit([0, 1, 2], [4.0, 4.0, 4.0]).r_squared)


def test_a_sum_under_samples_goes_straight_between_them():
    assert curves.total([0, 2, 4], [1.0, 3.0, 1.0], 0, 5) == 1 + 2 + 3 + 2 + 1
    assert curves.total([10, 13], [0.0, 3.0], 11, 2) == 1 + 2


@pytest.mark.parametrize(("first", "count"), [(-1, 3), (0, 6)])
def test_a_sum_past_the_samples_is_an_error(first, count):
    with pytest.raises(ValueError, match="do not rise from"):
        curves.total([0, 2, 4], [1.0, 3.0, 1.0], first, count)


def test_cases_take_turns_and_the_first_call_of_each_does_not_count():
    calls, told = [], []

    def case(name, seconds):
        def run():
            calls.append(name)
            return seconds.pop(0)

        return run

    records = interleaved(
        {"a": case("a", [100.0, 1.0, 3.0, 2.0]), "b": case("b", [100.0, 5.0, 5.0, 4.0])}, 3, between=lambda: told.append(1)
    )
    assert calls[:2] == ["a", "b"]
    assert [set(calls[at : at + 2]) for at in (2, 4, 6)] == [{"a", "b"}] * 3
    assert (median_seconds(records["a"]), median_seconds(records["b"]), len(told)) == (2.0, 5.0, 3)


def test_medians_leave_out_calls_beside_other_work(monkeypatch):
    busy = iter([0.0, 0.0, 0.0, 1e9, 1e9, 1e9])  # before and after each counted call: the second has company
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    seconds = iter([100.0, 1.0, 9.0, 2.0])
    assert median_seconds(interleaved({"a": lambda: next(seconds)}, 3)["a"]) == 1.5


def test_calls_beside_other_work_are_counted_in_a_note(monkeypatch):
    busy = iter([0.0, 0.0, 0.0, 1e9])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    notes = []
    assert kv_cost.Rounds(2, note=notes.append).medians({"a": lambda: 1.0}) == {"a": 1.0}
    assert notes[0].startswith("1 of 2 measurements ran beside more than 0.15 core of other work")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_filled_cache_holds_ordinary_numbers_in_every_slot(tiny_config, format):
    cache = filled(kv.init(tiny_config, 2, 40, format))
    for leaf in jax.tree.leaves(cache.stores):
        values = np.asarray(leaf)
        values = values.view(jnp.bfloat16).astype(np.float32) if values.dtype == np.uint16 else values
        assert values.min() >= 0.5 and values.max() <= 1.5 and values.std() > 0.1
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), kv.init(tiny_config, 2, 40, format)
    )


@pytest.fixture(scope="module")
def decoding(lm):
    return Decoding(lm, F32, batch=2, capacity=64, steps=4)


def test_decoding_runs_all_its_steps_from_any_length_in_any_order(decoding):
    for held in (60, 8, 60, 32):  # 60: to the last slot
        assert decoding(held) > 0
        assert np.asarray(decoding.cache.lengths).tolist() == [held + 4] * 2
    assert decoding(8, dispatches=3) > 0 and np.asarray(decoding.cache.lengths).tolist() == [20, 20]
    assert decoding.mean_held(8) == np.mean([9, 10, 11, 12])


def test_steps_that_did_not_run_are_an_error_and_no_time(decoding):
    with pytest.raises(RuntimeError, match=r"rows hold \[64, 64\] tokens after 1 x 4 steps from 62: some did not run"):
        decoding(62)


def test_bytes_are_those_of_the_live_arrays_beside_bf16(tiny_config):
    parts = kv_cost.sizes(tiny_config, FORMATS, 50)
    per_token = 3 * 2 * (8 + 8) * 4
    assert parts["f32"] == {
        "bytes_per_token": per_token,
        "bytes": per_token * 50 + 4,
        "to_bf16": (per_token * 50 + 4) / (per_token * 25 + 4),
    }
    assert parts["bf16"]["to_bf16"] == 1.0


def test_a_miscounted_cache_is_an_error(tiny_config, monkeypatch):
    monkeypatch.setattr(kv, "nbytes", lambda *_: 7)
    with pytest.raises(RuntimeError, match="a f32 cache of 1 x 50 was counted as 7 bytes, but its arrays have"):
        kv_cost.sizes(tiny_config, {"f32": F32}, 50)


def pretend(monkeypatch, seconds):
    """Decode steps take what `seconds(batch, capacity, held)` says."""

    class Pretended:
        def __init__(self, lm, format, batch, capacity, steps):
            self.shape, self.steps = (batch, capacity), steps

        def __call__(self, held, dispatches=1):
            return seconds(*self.shape, held)

        mean_held = Decoding.mean_held

    monkeypatch.setattr(kv_cost, "Decoding", Pretended)


def test_the_capacity_part_is_the_ratio_of_the_large_cache_to_the_small(lm, monkeypatch):
    pretend(monkeypatch, lambda batch, capacity, held: batch * capacity)
    parts = kv_cost.capacity(lm, FORMATS, kv_cost.Rounds(1), held=8, slots=(16, 64), batches=(1, 8))
    assert parts["bf16 x8"] == {"small_s": 8 * 16, "large_s": 8 * 64, "ratio": 4.0}
    assert list(parts) == ["f32 x1", "f32 x8", "bf16 x1", "bf16 x8"]


def test_the_slope_is_that_of_the_steps_and_its_rate_counts_the_formats_bytes(lm, monkeypatch):
    pretend(monkeypatch, lambda batch, capacity, held: 1.0 + (held + 4.5) / 1000)
    parts = kv_cost.held(lm, FORMATS, kv_cost.Rounds(2), lengths=[8, 16, 64])
    assert parts["f32"]["held"] == [12.5, 20.5, 68.5]
    assert (parts["f32"]["slope_s_per_token"], parts["f32"]["intercept_s"]) == pytest.approx((1e-3, 1.0))
    assert parts["f32"]["bytes_per_s"] == pytest.approx(384e3) and parts["bf16"]["bytes_per_s"] == pytest.approx(192e3)


def test_layers_with_a_window_do_not_grow(tiny_config):
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=4)) if number else layer
        for number, layer in enumerate(tiny_config.layers)
    )
    windowed = dataclasses.replace(tiny_config, layers=layers)
    assert kv_cost.growing_bytes(tiny_config, F32) == 384 and kv_cost.growing_bytes(windowed, F32) == 128


def test_recomputing_sums_the_forward_over_every_prefix(lm, monkeypatch):
    pretend(monkeypatch, lambda batch, capacity, held: 2.0)
    monkeypatch.setattr(kv_cost, "_forward_seconds", lambda lm, length: float(length))
    part = kv_cost.recompute(lm, F32, kv_cost.Rounds(1), prompt=10, new=11, samples=3)
    assert part["lengths"] == [10, 15, 20]
    assert (part["recomputed_s"], part["cached_s"]) == (sum(range(10, 21)), 11 * 2.0)
    assert part["factor"] == pytest.approx(165 / 22)


def test_the_forward_over_a_prefix_is_timed_with_nothing_cached(lm):
    assert 0 < kv_cost._forward_seconds(lm, 5) < 60


def test_quality_is_measured_on_as_many_tokens_as_were_asked(lm):
    told = []
    parts = kv_quality.quality(lm, FORMATS, tokens=100, window=64, chunk=32, say=told.append)
    assert [text.split(",")[0] for text in told] == ["quality: 64 of 100 tokens", "quality: 100 of 100 tokens"]
    assert parts["f32"] == {"perplexity": parts["f32"]["perplexity"], "ratio": 1.0, "ratio_error": 0.0, "mean_kl": 0.0, "agreement": 1.0}
    assert parts["bf16"]["ratio"] == pytest.approx(parts["bf16"]["perplexity"] / parts["f32"]["perplexity"], rel=1e-6)


def test_more_tokens_than_the_text_has_are_an_error(lm):
    with pytest.raises(UserError, match="--tokens=1000 is more than the evaluation text has for this model: give at most 199"):
        kv_quality.quality(lm, FORMATS, tokens=1000, window=64, chunk=32)


def test_a_quoted_peer_has_the_slope_of_its_bandwidth():
    (part,) = kv_peers.quoted(5700).values()
    assert part["slope_s_per_token"] == pytest.approx(1e-6)


def fake(name, seconds, **settings):
    settings = {"seconds": seconds, "tokens": [5], "hello": {}, **settings}
    return stacks.Stack(name, FAKE, settings, about="fake", modules=["json"], install=f"pip install {name}")


def test_a_peers_slope_is_measured_length_by_length(tmp_path):
    peer = fake("peer", [100.0, 8.0, 16.0, 8.0, 100.0, 24.0, 24.0, 24.0])
    given = {"repetitions": 3, "threads": 1, "note": pytest.fail}
    (part,) = kv_peers.measured([peer], sys.executable, tmp_path / "tiny.gguf", [10, 20], 50, **given).values()
    assert part["step_s"] == [1.0, 3.0] and part["held"] == [14.5, 24.5]
    assert part["slope_s_per_token"] == pytest.approx(0.2) and part["bytes_per_s"] == pytest.approx(250)


def test_a_peer_that_fails_is_noted_and_left_out(tmp_path):
    notes = []
    peers = [fake("shy", [1.0] * 4, fail_at="decode"), fake("broken", [], fail_start=True)]
    given = {"repetitions": 1, "threads": 1, "note": notes.append}
    assert kv_peers.measured(peers, sys.executable, tmp_path / "tiny.gguf", [10, 20], 50, **given) == {}
    assert notes[0] == "shy has no decode-10: ValueError: too long" and notes[1].startswith("broken is left out")


def test_the_plan_is_cut_to_the_models_context():
    given = {"tokens": 9, "window": 1024, "chunk": 128}
    long, short = (kv_parts.plan(kv_parts.PARTS, context, **given) for context in (32768, 2048))
    assert list(long) == list(kv_parts.PARTS)
    assert long["held"]["lengths"] == [256, 512, 1024, 2048, 4096, 8192]
    assert kv_parts.plan(["held"], 8192, **given) == {"held": {"lengths": [256, 512, 1024, 2048, 4096, 8184]}}
    assert short["held"]["lengths"] == [256, 512, 1024, 2040]
    assert short["capacity"]["slots"] == (512, 2048) and short["bytes"] == {"capacity": 2048}


def test_an_unknown_part_none_and_a_short_context_are_errors():
    with pytest.raises(UserError, match="--parts names 'speed', which is not known: use some of bytes, quality"):
        kv_parts.check(["bytes", "speed"])
    with pytest.raises(UserError, match="no part is named: give some of bytes"):
        kv_parts.check([])
    with pytest.raises(UserError, match="the model's context of 512 tokens is too short to measure: take one of at least 1024"):
        kv_parts.plan(["bytes"], 512, tokens=9, window=64, chunk=32)


def test_an_unknown_format_is_an_error_before_anything_is_loaded():
    with pytest.raises(UserError, match="--formats=f64 is not known"):
        kv_parts.formats(["f32", "f64"])
    with pytest.raises(UserError, match="no format is named"):
        kv_parts.formats([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["held"], "argument 'held' is not understood: all settings are flags, see --help"),
        (["--out=/dev/null"], "--out=/dev/null/kv.json can't be written"),
    ],
)
def test_a_wrong_call_is_an_error_in_one_line(arguments, message):
    """As a script: its own folder, where `kv` is another file, is then first on the path."""
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")


@pytest.fixture
def report(lm, monkeypatch):
    """Every part with tiny settings; the seconds are pretended."""
    planned = {
        "bytes": {"capacity": 64},
        "quality": {"tokens": 60, "window": 32, "chunk": 32},
        "capacity": {"held": 8, "slots": (32, 64), "batches": (1, 2)},
        "held": {"lengths": [8, 16, 40]},
        "recompute": {"prompt": 4, "new": 9, "samples": 3},
    }
    pretend(monkeypatch, lambda batch, capacity, held: 0.020 + 1e-6 * held)
    monkeypatch.setattr(kv_cost, "_forward_seconds", lambda lm, length: 0.2)
    saved = []
    given = {"peers": lambda lengths: kv_peers.quoted(192), "save": lambda report: saved.append(list(report))}
    found = kv_parts.measure(lm, {"f32": F32}, planned, kv_cost.Rounds(2), **given)
    assert [keys[-1] for keys in saved] == ["bytes", "quality", "capacity", "peers", "recompute"]  # a run that is cut short keeps these
    return {**found, "ceilings": CEILINGS, "notes": ["a note"]}


def test_a_whole_report_survives_json_and_its_page_has_every_part(report):
    again = json.loads(json.dumps(report))
    page = kv_page.markdown(again)
    assert page == kv_page.markdown(report)
    assert page.count("\n## ") == 5 and "- a note" in page
    assert "| f32 | 384 | 0.0 |" in page and "| llama.cpp (quoted) | - | - |" in page
    assert "| f32 x2 | 20.01 | 20.01 | 1.000 | yes |" in page and "| 0.2 | 1.8 | 10.0 | yes |" in page
    assert "Took bytes 0 s, quality" in page


def test_the_limit_of_a_held_token_is_its_bytes_at_the_most_that_was_read(report):
    line = next(line for line in kv_page.markdown(report).splitlines() if line.startswith("| llama.cpp (quoted)"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[6:] == ["192", "48", "5.7", "142%"]  # 192 bytes at 4 GB/s; 5.7 GB/s of 4


def test_a_bar_that_is_missed_is_marked(report):
    missed = json.loads(json.dumps(report))
    missed["recompute"]["factor"] = 4.9
    missed["capacity"]["f32 x1"]["ratio"] = 1.151
    page = kv_page.markdown(missed)
    assert "| 4.9 | NO |" in page and "| 1.151 | NO |" in page
    missed["recompute"]["factor"] = 5.0
    assert "| 5.0 | yes |" in kv_page.markdown(missed)


def test_a_part_that_was_not_measured_is_not_on_the_page(report):
    only = {key: report[key] for key in ("model", "machine", "settings", "seconds", "ceilings", "notes", "bytes")}
    page = kv_page.markdown(only)
    assert page.count("\n## ") == 1 and "## Bytes" in page


def test_the_plot_is_a_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    kv_plot.plot(report, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes()[:4] == b"\x89PNG"
