"""The driver's own logic, with workers that only pretend to measure."""

import dataclasses
import json
import pathlib
import sys
import types

import pytest

from benchmarks import cases, compare, machine, page, report, stacks
from benchmarks.driver import Measurement, Record
from benchmarks.limits import Work, limit
from runtime import UserError

FAKE = pathlib.Path(__file__).parent / "fake_worker.py"
WORK = {"body_weights": 90, "head_weights": 10, "weight_bytes": 400, "kv_bytes": 2, "attention_flops": 4}
WARM_UP = 1000.0  # seconds: would show in any median


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


def fake(name, seconds, *, tokens=(5,), modules=(), hello=None, **settings):
    """A stack that takes the given seconds, call by call; with `modules` it is a peer, otherwise it is ours."""
    hello = hello if hello is not None else {} if modules else {"work": WORK}
    settings = {"seconds": seconds, "tokens": list(tokens), "hello": hello, **settings}
    return stacks.Stack(name, FAKE, settings, about=f"fake {name}", modules=modules, install=f"pip install {name}")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Other work on this machine must not decide which of the pretended measurements count."""
    monkeypatch.setattr(machine, "_busy_seconds", lambda: None)


def run(chosen, names, model, **changes):
    ceilings = fake("ceilings", [], hello={"how": "guessed"}, ceilings={"read_bytes_per_s": 1e3, "matmul_flop_per_s": 1e4})
    settings = {"threads": 1, "repetitions": 3, "budget_seconds": 60, "ceilings": ceilings, **changes}
    return compare.compare(chosen, [cases.parse(name) for name in names], model, **settings)


def test_medians_leave_out_the_warm_up_and_ratios_are_to_the_best_peer(model):
    ours = fake("ours", [WARM_UP, 1.0, 4.0, 2.0])
    slow = fake("slow", [WARM_UP, 8.0, 8.0, 8.0], modules=["json"])
    fast = fake("fast", [WARM_UP, 1.0, 0.5, 0.25], modules=["json"])
    result = run([ours, slow, fast], ["prefill-8"], model)
    case = result["cases"]["prefill-8"]
    assert case["stacks"]["ours"]["tokens_per_s"] == {"median": 4.0, "min": 2.0, "max": 8.0, "all": [8.0, 2.0, 4.0]}
    assert case["best_peer"] == "fast"
    assert case["ours"]["ours"]["to_best_peer"] == 4.0 / 16.0
    assert "fast" not in case["ours"]
    assert (result["stacks"]["fast"]["load_peak_bytes"], result["stacks"]["fast"]["peak_bytes"]) == (1 << 20, 2 << 20)


def test_decode_counts_the_tokens_of_all_rows(model):
    result = run([fake("ours", [WARM_UP, 2.0, 2.0, 2.0])], ["decode-4x8"], model)
    case = result["cases"]["decode-4x8"]
    assert case["stacks"]["ours"]["tokens_per_s"]["median"] == 8 * case["steps"] / 2.0
    assert case["best_peer"] is None and case["ours"]["ours"]["to_best_peer"] is None


def test_a_peer_that_is_not_installed_is_left_out_with_the_command_that_installs_it(model, capsys):
    result = run([fake("ours", [1.0] * 4), fake("absent", [], modules=["json", "no_such_module"])], ["prefill-8"], model)
    assert list(result["stacks"]) == ["ours"]
    assert "absent is left out, since no_such_module is not installed" in result["notes"][0]
    assert "pip install absent" in result["notes"][0]
    assert "pip install absent" in capsys.readouterr().err


def test_a_worker_that_can_not_start_is_left_out_with_its_last_words(model):
    result = run([fake("ours", [1.0] * 4), fake("broken", [], modules=["json"], fail_start=True)], ["prefill-8"], model)
    assert list(result["stacks"]) == ["ours"]
    assert "broken is left out, since it could not load: it ended with exit code 1: no such instruction" in result["notes"]


def test_a_failed_case_leaves_the_others(model):
    shy = fake("shy", [1.0] * 4, modules=["json"], fail_at="decode")
    result = run([fake("ours", [1.0] * 8), shy], ["decode-4", "prefill-8"], model)
    assert "shy" not in result["cases"]["decode-4"]["stacks"]
    assert "shy" in result["cases"]["prefill-8"]["stacks"]
    assert "shy has no decode-4: ValueError: too long" in result["notes"]


def test_a_worker_that_dies_is_asked_no_more(model):
    mortal = fake("mortal", [1.0] * 4, modules=["json"], die_at="decode")
    result = run([fake("ours", [1.0] * 8), mortal], ["decode-4", "prefill-8"], model)
    assert "mortal has no decode-4: it ended with exit code 3" in result["notes"]
    assert "mortal" not in result["cases"]["prefill-8"]["stacks"]
    assert result["stacks"]["mortal"]["load_seconds"] == 0.5


def test_a_spent_budget_leaves_one_repetition_and_says_so(model):
    result = run([fake("ours", [1.0] * 4)], ["prefill-8", "prefill-9"], model, budget_seconds=0)
    assert [len(case["stacks"]["ours"]["other_cores"]) for case in result["cases"].values()] == [1, 1]
    assert "the budget of 0 s cut the repetitions of prefill-8 (1 of 3), prefill-9 (1 of 3)" in result["notes"]


def test_nothing_to_compare_is_an_error_that_holds_the_reasons(model):
    with pytest.raises(UserError, match=r"nothing to compare: .*pip install absent"):
        run([fake("absent", [], modules=["no_such_module"])], ["prefill-8"], model)


def test_an_interpreter_that_does_not_run_is_an_error(model):
    with pytest.raises(UserError, match="--peers_python=/no/such/python"):
        run([fake("peer", [], modules=["json"])], ["prefill-8"], model, peers_python="/no/such/python")


def test_vllm_has_an_interpreter_of_its_own_where_one_is_given(model):
    ours = fake("ours", [1.0] * 4)
    peer = fake("peer", [1.0] * 4, modules=["json"])
    vllm = dataclasses.replace(fake("vllm", [1.0] * 4, modules=["json"]), python_flag="vllm_python")
    assert list(run([ours, peer, vllm], ["prefill-8"], model)["stacks"]) == ["ours", "peer", "vllm"]
    with pytest.raises(UserError, match="--vllm_python=/no/such/python does not run"):
        run([ours, peer, vllm], ["prefill-8"], model, vllm_python="/no/such/python")
    absent = dataclasses.replace(vllm, modules=["no_such_module"])
    result = run([ours, absent], ["prefill-8"], model, vllm_python=sys.executable, peers_python="/no/such/python")
    assert f"vllm is left out, since no_such_module is not installed for --vllm_python={sys.executable}: " in result["notes"][0]


def test_the_stacks_of_vllm_name_its_flag():
    named = {name for name, stack in stacks.STACKS.items() if stack.python_flag == "vllm_python"}
    assert named == {"vllm-bf16", "vllm-bf16-compiled"} and named <= set(stacks.DEFAULT)


def test_tokens_are_compared_up_to_the_first_difference(model):
    ours = fake("ours", [1.0] * 4, tokens=[5, 6, 1, 2])
    peer = fake("peer", [1.0] * 4, tokens=[5, 6, 0, 2], modules=["json"])
    result = run([ours, peer], ["decode-4"], model)
    assert result["reference"] == "ours"
    assert result["tokens_equal"] == {"ours": (32, 32), "peer": (2, 32)}


def test_the_limit_of_decode_is_what_must_be_read_over_the_bandwidth():
    case = cases.Case("decode", held=10, batch=1, steps=1)
    found = limit(case, Work(**WORK), read_bytes_per_s=1e3, flop_per_s=1e9)
    assert found.bytes == 400 + 11 * 2  # the token itself is cached before it is read
    assert found.tokens_per_s == pytest.approx(1e3 / 422)
    assert found.bound == "reading"


def test_a_batch_shares_the_weights_until_arithmetic_binds():
    case = cases.Case("decode", held=10, batch=100, steps=1)
    found = limit(case, Work(**WORK), read_bytes_per_s=1e9, flop_per_s=1e4)
    assert found.bytes == 400 + 100 * 11 * 2
    assert found.flops == 100 * (2 * 100 + 11 * 4)
    assert found.tokens_per_s == pytest.approx(1e4 / 244)
    assert found.bound == "arithmetic"


def test_the_limit_of_prefill_counts_the_head_once_and_causal_attention():
    found = limit(cases.parse("prefill-3"), Work(**WORK), read_bytes_per_s=1e9, flop_per_s=1e4)
    assert found.flops == 2 * (3 * 90 + 10) + (1 + 2 + 3) * 4
    assert found.tokens_per_s == pytest.approx(3 * 1e4 / found.flops)


def test_the_report_states_the_limit_before_what_was_reached(model):
    result = run([fake("ours", [WARM_UP, 1.0, 1.0, 1.0])], ["prefill-8"], model)
    bound = result["cases"]["prefill-8"]["ours"]["ours"]["limit"]
    assert bound["reached"] == pytest.approx(8.0 / bound["tokens_per_s"])
    head, cells = table(page.markdown(result), "limit, tok/s")
    assert head.index("limit, tok/s") < head.index("tok/s") < head.index("of the limit")
    assert cells[head.index("of the limit")] == f"{bound['reached']:.0%}"


def record(*pairs):
    """Of (seconds, cores of other work) pairs."""
    return Record(WARM_UP, tuple(Measurement(seconds, (5,), cores) for seconds, cores in pairs))


def build(by_stack, ours):
    """The report of one case of 8 tokens, by stack."""
    work = Work(**WORK)
    loaded = {name: report.Loaded(name, name not in ours, 0.5, 1.0, 0, 0, {}, work if name in ours else None) for name in by_stack}
    settings = {"model": "tiny.gguf", "threads": 1, "repetitions": 3, "budget_seconds": 60}
    ceilings = report.Ceilings((1e3, 2e3, 1e3), (1e4,), "guessed")
    return report.build(machine.describe(), settings, loaded, {cases.parse("prefill-8"): by_stack}, ceilings, [])


def test_disturbed_measurements_are_left_out_unless_there_are_no_others():
    ours = record((1.0, 0.0), (4.0, None), (9.0, 0.16))
    peer = record((0.5, 0.9), (0.5, 0.9), (0.4, 1.9))
    result = build({"ours": ours, "peer": peer}, ours=["ours"])
    head, cells = table(page.markdown(json.loads(json.dumps(result))), "| ours | peer |")
    assert dict(zip(head, cells, strict=True)) == {"case": "prefill-8", "ours": "5.00 [2.00-8.00]", "peer": "16.0 [16.0-20.0] ~"}
    head, cells = table(page.markdown(result), "limit, tok/s")
    assert (cells[head.index("tok/s")], cells[head.index("best peer, tok/s")]) == ("5.00", "16.0 ~ (peer)")
    assert any(text.startswith("4 of 6 measurements ran beside more than 0.15 core of other work") for text in result["notes"])


def test_a_quiet_machine_needs_no_warning():
    result = build({"ours": record((1.0, 0.0), (1.0, 0.15), (1.0, None))}, ours=["ours"])
    assert result["notes"] == []


def test_the_limit_takes_the_most_that_the_machine_did():
    result = build({"ours": record((1.0, 0.0))}, ours=["ours"])
    assert result["ceilings"]["read_bytes_per_s"]["median"] == 1e3
    expected = limit(cases.parse("prefill-8"), Work(**WORK), 2e3, 1e4)
    assert result["cases"]["prefill-8"]["ours"]["ours"]["limit"]["tokens_per_s"] == expected.tokens_per_s


def table(text, column):
    """Head and first row of the table whose head holds `column`."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| ") and column in line)
    return tuple([cell.strip() for cell in lines[number].strip("|").split("|")] for number in (at, at + 2))


def test_without_ceilings_the_page_has_no_limit_but_the_rest(model):
    result = run([fake("ours", [1.0] * 4)], ["prefill-8"], model, ceilings=None)
    head, cells = table(page.markdown(result), "limit, tok/s")
    assert (cells[head.index("limit, tok/s")], cells[head.index("tok/s")]) == ("-", "8.00")


def test_the_files_hold_what_was_printed(model, tmp_path):
    result = run([fake("ours", [1.0] * 4)], ["prefill-8"], model)
    text = compare.save_files(result, tmp_path / "new" / "c.json", tmp_path / "c.md")
    assert (tmp_path / "c.md").read_text(encoding="utf-8") == text == page.markdown(result)
    assert json.loads((tmp_path / "new" / "c.json").read_text(encoding="utf-8"))["cases"]["prefill-8"]["stacks"]["ours"]


def test_every_worker_reads_the_same_prompt_of_valid_tokens():
    case = cases.parse("decode-64x8")
    request = case.request(7)
    assert request == case.request(7)
    assert (request["op"], request["batch"], request["steps"]) == ("decode", 8, case.steps)
    assert len(request["tokens"]) == 64 and set(request["tokens"]) <= set(range(7))


def test_names_of_cases_are_those_of_the_flags():
    assert [cases.parse(name).name for name in cases.DEFAULT] == list(cases.DEFAULT)


@pytest.mark.parametrize("name", ["decode", "prefill-0", "prefill-12x2", "decode-8x0", "serve-8"])
def test_an_unknown_case_is_an_error_that_names_the_forms(name):
    with pytest.raises(UserError, match=f"case '{name}' is not known: give prefill-TOKENS"):
        cases.parse(name)


def test_an_unknown_stack_is_an_error_that_names_the_known():
    with pytest.raises(UserError, match="stack 'vllm' is not known: use some of diptych-native"):
        stacks.find(["diptych-f32", "vllm"])


def test_every_peer_says_how_it_is_installed():
    for stack in stacks.STACKS.values():
        assert stack.worker.is_file()
        assert stack.is_peer == ("pip install" in stack.install)


def test_a_peer_sees_nothing_of_this_repository(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(stacks.ROOT))
    for stack in stacks.STACKS.values():
        assert stack.environment(3).get("PYTHONPATH") == (None if stack.is_peer else str(stacks.ROOT))
        assert stack.environment(3)["NPROC"] == "3"


def test_an_argument_that_is_no_flag_is_an_error_in_one_line(capsys):
    assert compare.main(["compare", "llama.cpp"]) == 2
    assert capsys.readouterr().err == "error: argument 'llama.cpp' is not understood: all settings are flags, see --help\n"


def test_a_spread_is_median_least_and_most():
    assert report.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "all": [3.0, 1.0, 2.0]}


def test_other_work_is_what_this_process_and_its_worker_did_not_do(monkeypatch):
    busy = iter([10.0, 10.0 + 1.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine, "_session_seconds", lambda session: 0.0)
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(machine, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    assert machine.OtherWork(session=1).cores() == pytest.approx(0.5, abs=0.05)
