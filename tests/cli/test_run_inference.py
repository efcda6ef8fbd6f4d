"""What `run_inference.py` promises its users: exit codes, what goes to stdout and to stderr, and that no mistake ends in a traceback."""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import re
import stat
import sys

import pytest

import checkpoint

KEYS = [
    *("model", "text", "tokens", "prompt_tokens", "finish_reason", "ttft_s", "itl_s"),
    *("prefill_tokens_per_s", "decode_tokens_per_s", "compile_s", "compiles"),
]
FLAGS = pathlib.Path(__file__).parents[2] / "command" / "flags.py"
SUMMARY = re.compile(
    r"\[.+\] prompt (?P<prompt>\d+) tokens?( \((?P<held>\d+) held\))? \| TTFT \d+ ms \| prefill \d+ tok/s \| new (?P<new>\d+) tokens?"
    r"( \| ITL p50 [\d.]+ ms p99 [\d.]+ ms \| decode [\d.]+ tok/s( per row)? \| \d+ MB/token, [\d.]+ GB/s)?"
    r" \| load [\d.]+ s, compile [\d.]+ s \(\d+ programs?\)"
)
ENDLESS = ["--ignore_eos", "--max_new_tokens=8000", "--steps_per_dispatch=1"]  # some seconds of the tiny model
IN_DECODE = "Finished XLA compilation of jit(decode)"  # what JAX_LOG_COMPILES=1 tells when the answer is about to begin
# A session of its own, whose terminal standard input is: Ctrl-C then reaches the process as it does a user's.
ON_TERMINAL = """
import os, sys
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def summary(line: str) -> re.Match:
    match = SUMMARY.fullmatch(line)
    assert match, line
    return match


def check_schema(answer: dict, *extra: str) -> None:
    """Exactly the promised keys, in their order, with the promised types."""
    assert list(answer) == [*KEYS, *extra]
    assert isinstance(answer["model"], str) and isinstance(answer["text"], str) and isinstance(answer["finish_reason"], str)
    assert isinstance(answer["tokens"], list) and all(type(token) is int for token in answer["tokens"])
    assert type(answer["prompt_tokens"]) is int and type(answer["compiles"]) is int
    assert type(answer["ttft_s"]) is float and answer["ttft_s"] > 0
    assert type(answer["compile_s"]) in (int, float) and answer["compile_s"] >= 0
    assert list(answer["itl_s"]) == ["mean", "p50", "p99"]
    rates = [*answer["itl_s"].values(), answer["decode_tokens_per_s"]]
    assert all(type(rate) is float and rate > 0 for rate in rates) if len(answer["tokens"]) > 1 else rates == [None] * 4
    assert type(answer["prefill_tokens_per_s"]) is float and answer["prefill_tokens_per_s"] > 0


# Bad input

Content = bytes | int | None  # of a file: its bytes, or as many of the tiny model's, or a named pipe


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line that is refused. In `args`, TINY stands for the tiny model's path; `files` are in the working folder."""

    name: str
    args: tuple[str, ...]
    parts: tuple[str, ...]  # of the one line: the value, the limit, the remedy
    stdin: bytes = b""
    files: tuple[tuple[str, Content], ...] = ()


def mistake(name: str, *args: str, says: tuple[str, ...] | str, stdin: bytes = b"", **files: Content) -> Mistake:
    """`m_json=b"..."` is the file m.json."""
    named = tuple((key.replace("_", "."), data) for key, data in files.items())
    return Mistake(name, args, (says,) if isinstance(says, str) else says, stdin, named)


def messages(name: str, data: bytes, *says: str) -> Mistake:
    return mistake(f"messages: {name}", "--model=TINY", "--messages=m.json", says=says, m_json=data)


def lines(name: str, data: bytes, *says: str, args: tuple[str, ...] = ()) -> Mistake:
    return mistake(f"prompt_file: {name}", "--model=TINY", "--prompt_file=in.jsonl", *args, says=says, in_jsonl=data)


def option(flag: str, *says: str) -> Mistake:
    return mistake(flag, "--prompt=Hi", "--json", flag, says=(flag.removeprefix("--").partition("=")[0], *says))


def out(name: str, path: str, *says: str, **files: Content) -> Mistake:
    return mistake(f"out: {name}", "--model=TINY", "--prompt=Hi", f"--out={path}", says=says, **files)


def evaluation(name: str, *args: str, says: tuple[str, ...], **files: Content) -> Mistake:
    return mistake(f"eval: {name}", "--model=TINY", "--task=eval", "--text_file=m.txt", *args, says=says, **files)


def packing(name: str, *args: str, says: tuple[str, ...], **files: Content) -> Mistake:
    return mistake(f"quantize: {name}", "--model=TINY", "--task=quantize", *args, says=says, **files)


MISTAKES = [
    mistake("empty prompt", "--prompt=", says=("--prompt", "empty", "at least one character")),
    mistake("nothing on stdin", says=("standard input", "empty")),
    mistake("an empty line on stdin", stdin=b"\n", says=("standard input", "empty")),
    mistake("stdin is no text", "--model=TINY", stdin=b"caf\xe9\n", says="UTF-8"),
    mistake("prompt too long", "--model=TINY", "--raw", stdin=b"word " * 4000, says=("20000 tokens", "8192", "shorten it")),
    mistake("prompt as argument is no text", "--model=TINY", b"--prompt=caf\xe9".decode(errors="surrogateescape"), says="UTF-8"),
    option("--temperature=-1", "-1", "a number from 0"),
    option("--temperature=nan", "nan", "a number from 0"),
    option("--top_p=0", "0", "above 0 to 1"),
    option("--top_k=-1", "-1", "a whole number from 0"),
    option("--min_p=2", "2", "from 0 to 1"),
    option("--repetition_penalty=0", "0", "above 0"),
    option("--max_new_tokens=0", "0", "a whole number from 1"),
    option("--seed=4294967296", "4294967296", "a whole number from 0 to 4294967295"),
    option("--logprobs=21", "21", "a whole number from 0 to 20"),
    option("--stop=", "empty"),
    option("--batch_size=0", "0", "at least 1"),
    option("--steps_per_dispatch=0", "0", "at least 1"),
    option("--capacity=0", "0", "at least 1"),
    option("--logit_bias=42", "42", "TOKEN_ID=VALUE", "--logit_bias=42=-100"),
    option("--logit_bias=the=1", "the=1", "TOKEN_ID=VALUE"),
    option("--logit_bias=42=nan", "42", "nan", "-1000 to 1000"),
    option("--logit_bias=42=1e39", "42", "1e+39", "-1000 to 1000"),
    option("--top_k=many", "--top_k=many", "--help"),
    option("--temperature=hot", "--temperature=hot", "--help"),
    option("--json=maybe", "--json=maybe", "--help"),
    option("--weights=int3", "int3", "auto|native|f32|bf16|int8|w8a8|int4|fp8"),
    option("--task=serve", "serve", "generate|chat"),
    *(
        mistake(f"{flag} of an answer", "--model=TINY", "--prompt=Hi", flag, says=("--task=generate", flag.partition("=")[0]))
        for flag in ("--text_file=m.txt", "--against=f32", "--window=64", "--stride=8", "--max_tokens=9")
    ),
    mistake("eval flags of a chat", "--model=TINY", "--task=chat", "--window=64", says=("--task=chat", "--window")),
    *(
        evaluation(f"with {flag}", flag, says=("--task=eval", flag.partition("=")[0]))
        for flag in ("--prompt=Hi", "--prompt_file=m.txt", "--out=a.json", "--raw", "--stats", "--capacity=9", "--cache=paged")
    ),
    evaluation("text is missing", says=("m.txt", "check the path")),
    evaluation("text is too short", says=("m.txt", "1 token", "at least two"), m_txt=b"H"),
    evaluation("text is no text", says=("m.txt", "UTF-8", "byte 1"), m_txt=b"H\xff\x00"),
    evaluation("text has what the vocabulary lacks", says=("m.txt", "'日'", "character 3"), m_txt="Hi 日".encode()),
    evaluation("stride beyond window", "--window=8", "--stride=9", says=("stride 9", "window 8", "at most 8"), m_txt=b"Hi"),
    evaluation("window beyond context", "--window=9000", says=("window 9000", "8192"), m_txt=b"Hi there"),
    evaluation("no window", "--window=0", says=("--window=0", "at least 1")),
    evaluation("no tokens", "--max_tokens=0", says=("--max_tokens=0", "at least 1")),
    evaluation("against itself", "--weights=bf16", "--against=bf16", says=("--against=bf16", "--weights"), m_txt=b"Hi"),
    evaluation("against what is not known", "--against=int3", says=("int3", "auto|native|f32|bf16|int8|w8a8|int4|fp8")),
    mistake("eval of an unknown model", "--model=gpt-99", "--task=eval", says=("'gpt-99'", "smollm2-135m-instruct")),
    packing("no folder", says=("--task=quantize writes a folder", "--out=FOLDER")),
    packing("5 bits", "--out=new", "--bits=5", says=("--bits=5", "3, 4 or 8")),
    packing("a group of 48", "--out=new", "--group=48", says=("--group=48", "multiple of 32", "32, 64 or 128")),
    packing("an unknown method", "--out=new", "--method=magic", says=("magic", "rtn|awq|gptq|learned")),
    packing("zeros at 8 bits", "--out=new", "--bits=8", "--nosymmetric", says=("--nosymmetric", "--bits=4")),
    packing("a group that does not divide", "--out=new", "--group=128", "--method=rtn", says=("a group of 128", "inputs of layer 0")),
    packing("a short text", "--out=new", "--group=32", "--calibration=m.txt", says=("calibration text", "--method=rtn"), m_txt=b"abc"),
    packing("no such text", "--out=new", "--calibration=m.txt", says=("m.txt",)),
    packing("rounded weights", "--out=new", "--weights=int8", says=("--task=quantize has no use for --weights",)),
    mistake("bits without quantize", "--prompt=Hi", "--bits=3", says=("--task=generate has no use for --bits",)),
    option("--weights_group=32", "32", "--weights=int8 or int4"),
    option("--head_weights=int3", "int3", "auto|native"),
    option("--kv=int3", "int3", "auto|f32|bf16|int8|int4|fp8"),
    option("--cache=ring", "ring", "dense|paged"),
    option("--kv_group=16", "16", "--kv=int8"),
    option("--page_size=16", "16", "--cache=paged"),
    mistake("page size 3", "--prompt=Hi", "--cache=paged", "--page_size=3", says=("page size 3", "power of two", "2 or 4")),
    mistake("page size 0", "--prompt=Hi", "--cache=paged", "--page_size=0", says=("page size 0", "power of two", "1 or 2")),
    mistake("no pages", "--model=TINY", "--prompt=Hi", "--cache=paged", "--kv_pages=0", says=("0 pages", "at least 2 pages")),
    mistake("pages of slots", "--model=TINY", "--prompt=Hi", "--kv_pages=9", says=("a pool of pages", "--cache=paged")),
    mistake("prefixes of slots", "--model=TINY", "--prompt=Hi", "--prefix_cache", says=("a prefix cache", "--cache=paged")),
    mistake(
        "pages too few",
        *("--model=TINY", "--prompt=Hello", "--raw", "--cache=paged", "--page_size=2", "--kv_pages=2"),
        says=("5 tokens", "2 pages of 2 tokens", "at least 4 pages", "--kv_pages"),
    ),
    mistake(
        "heads without groups", "--model=TINY", "--prompt=Hi", "--kv=fp8", says=("8 channels", "groups of 32", "--kv_group=8", "--kv=bf16")
    ),
    mistake("a group of 3", "--prompt=Hi", "--kv=int4", "--kv_group=3", says=("3 channels", "power of two", "32")),
    mistake("unknown flag", "--bogus", says=("bogus", "--help")),
    mistake("unknown flag, near a known one", "--promt=Hi", says=("promt", "prompt")),
    mistake("a flag without its value", "--prompt", says="--prompt"),
    mistake("stray argument", "Why is the sky blue?", says=("'Why is the sky blue?'", "--prompt")),
    mistake("two prompts", "--prompt=Hi", "--messages=m.json", says=("--prompt", "--messages", "give one")),
    mistake("another two prompts", "--prompt=Hi", "--prompt_file=in.jsonl", says=("--prompt", "--prompt_file", "give one")),
    mistake("logprobs with nowhere to go", "--prompt=Hi", "--logprobs=2", says=("--logprobs", "--json", "--out")),
    mistake("system without template", "--model=TINY", "--prompt=Hi", "--raw", "--system=Be brief.", says=("--system", "--raw")),
    mistake("capacity below the prompt", "--model=TINY", "--prompt=Hello", "--raw", "--capacity=3", says=("5 tokens", "3", "at least 6")),
    mistake("capacity above the context", "--model=TINY", "--prompt=Hi", "--capacity=8193", says=("8193", "8192")),
    mistake("bias outside the vocabulary", "--model=TINY", "--prompt=Hi", "--logit_bias=101=1", says=("101", "0 to 100")),
    mistake("bias below the vocabulary", "--model=TINY", "--prompt=Hi", "--logit_bias=-1=1", says=("-1", "0 to 100")),
    *(
        mistake(f"chat with {flag}", "--model=TINY", "--task=chat", flag, says=("--task=chat", flag.partition("=")[0]), m_json=b"[]")
        for flag in ("--prompt=Hi", "--messages=m.json", "--prompt_file=m.json", "--out=a.jsonl", "--json", "--raw", "--logprobs=1")
    ),
    mistake("chat with a bias outside the vocabulary", "--model=TINY", "--task=chat", "--logit_bias=101=1", says=("101", "0 to 100")),
    mistake("unknown model", "--model=gpt-99", "--prompt=Hi", says=("'gpt-99'", "smollm2-135m-instruct")),
    mistake("misspelt model", "--model=smollm2-135m-instuct", "--prompt=Hi", says="did you mean 'smollm2-135m-instruct'"),
    mistake("no model", "--model=", "--prompt=Hi", says="empty"),
    mistake("model is a text file", "--model=notes.txt", "--prompt=Hi", says=("notes.txt", ".gguf", "Milk"), notes_txt=b"Milk\n"),
    mistake("model is a folder", "--model=.", "--prompt=Hi", says=("folder", ".gguf")),
    mistake("model is missing", "--model=missing.gguf", "--prompt=Hi", says=("missing.gguf", "does not exist", "check the path")),
    mistake("model is empty", "--model=m.gguf", "--prompt=Hi", says=("m.gguf", "0 bytes"), m_gguf=b""),
    mistake("model ends in its header", "--model=m.gguf", "--prompt=Hi", says=("m.gguf", "incomplete", "download it again"), m_gguf=500),
    mistake(
        "model ends in its weights", "--model=m.gguf", "--prompt=Hi", says=("m.gguf", "incomplete", "download it again"), m_gguf=50_000
    ),
    mistake("messages: missing", "--messages=nosuch.json", says=("nosuch.json", "check the path")),
    messages("not JSON", b'[{"role": "user"', "m.json", "not JSON", "line 1"),
    messages("empty file", b"", "m.json", "not JSON"),
    messages("not UTF-8", b'[{"role": "user", "content": "caf\xe9"}]', "m.json", "UTF-8", "byte 33"),
    messages("nested beyond reason", b"[" * 100_000, "m.json"),
    messages("no message", b"[]", "m.json", "empty"),
    messages("a number", b"42", "m.json", "list"),
    messages("a string", b'"Hi"', "m.json", "list"),
    messages("token ids", b"[1, 2, 3]", "role"),
    messages("bad role", b'[{"role": "wizard", "content": "Hi"}]', "'wizard'", "system, developer, user, assistant"),
    messages("no content", b'[{"role": "user"}]', "message 0", "content"),
    messages("half a surrogate pair", b'[{"role": "user", "content": "\\ud800"}]', "UTF-8"),
    mistake("messages and raw", "--model=TINY", "--messages=m.json", "--raw", says="--raw", m_json=b'[{"role": "user", "content": "Hi"}]'),
    mistake(
        "two system messages",
        *("--model=TINY", "--messages=m.json", "--system=Be brief."),
        says=("system", "--system"),
        m_json=b'[{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]',
    ),
    mistake("prompt_file: missing", "--prompt_file=nosuch.jsonl", says=("nosuch.jsonl", "check the path")),
    lines("empty", b"", "in.jsonl", "no prompt"),
    lines("blank lines only", b"\n \n", "in.jsonl", "no prompt"),
    lines("line 3 is no JSON", b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n', "in.jsonl line 3", "not JSON"),
    lines("a line is no object", b'["a"]\n', "in.jsonl line 1", "object"),
    lines("neither prompt nor messages", b'{"text": "a"}\n', "in.jsonl line 1", '"prompt"', '"messages"'),
    lines("both", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}\n', "in.jsonl line 1", '"prompt"', '"messages"'),
    lines("empty prompt", b'{"prompt": "a"}\n{"prompt": ""}\n', "in.jsonl line 2", "empty"),
    lines("prompt is a number", b'{"prompt": 5}\n', "in.jsonl line 1", "prompt"),
    lines("prompt is 0", b'{"prompt": 0}\n', "in.jsonl line 1", "string"),
    lines("messages is a string", b'{"messages": "Hi"}\n', "in.jsonl line 1", "list"),
    lines("unknown option", b'{"prompt": "a", "tempo": 1}\n', "in.jsonl line 1", "'tempo'", "temperature"),
    lines("line 2 is out of range", b'{"prompt": "a"}\n{"prompt": "b", "top_p": 0}\n', "in.jsonl line 2", "top_p 0", "above 0 to 1"),
    lines("an option is a string", b'{"prompt": "a", "temperature": "hot"}\n', "in.jsonl line 1", "temperature", "hot", "a number from 0"),
    lines("an option is null", b'{"prompt": "a", "stop": null}\n', "in.jsonl line 1", "stop"),
    lines("stop is a number", b'{"prompt": "a", "stop": 5}\n', "in.jsonl line 1", "stop", "5", "string"),
    lines("stop holds a number", b'{"prompt": "a", "stop": [5]}\n', "in.jsonl line 1", "stop", "5", "string"),
    lines("ignore_eos is no boolean", b'{"prompt": "a", "ignore_eos": "no"}\n', "in.jsonl line 1", "ignore_eos", "no", "true or false"),
    lines("bad role in line 2", b'{"prompt": "a"}\n{"messages": [{"role": "wizard", "content": "a"}]}\n', "in.jsonl line 2", "'wizard'"),
    lines("line 2 too long", b'{"prompt": "a"}\n{"prompt": "bcdef"}\n', "in.jsonl line 2", "5 tokens", "4", args=("--raw", "--capacity=4")),
    lines("out is in", b'{"prompt": "a"}\n', "--out", "in.jsonl", args=("--out=in.jsonl",)),
    out("missing folder", "nosuch/a.jsonl", "nosuch", "does not exist"),
    out("a folder", ".", "folder"),
    out("under a file", "notes.txt/a.jsonl", "notes.txt", notes_txt=b"Milk\n"),
    out("name too long", "x" * 300, "name too long"),
    out("no name", "", "--out="),
    out("no regular file", "pipe", "pipe", "regular file", pipe=None),
    # A late mistake: the file that is there keeps its content.
    mistake(
        "out survives",
        *("--model=TINY", "--prompt=Hi", "--out=a.jsonl", "--logit_bias=9999=1"),
        says="9999",
        a_jsonl=b"precious\n",
    ),
]


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")  # no reading of the pipe
        for path in sorted(folder.iterdir())
    }


def commit(case: Mistake, folder: pathlib.Path, tiny, cli_in) -> tuple[object, bool]:
    """Runs it; also tells whether the files are as they were."""
    for name, content in case.files:
        if content is None:
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else pathlib.Path(tiny.path).read_bytes()[:content])
    before = snapshot(folder)
    result = cli_in(folder, *(arg.replace("TINY", tiny.path) for arg in case.args), stdin=case.stdin)
    return result, snapshot(folder) == before


@pytest.fixture(scope="module")
def committed(request, tmp_path_factory, tiny, warm_cli_in):
    """committed(case): its result, in a process that had its imports done. All that were selected run beforehand, as many at a time as
    there are cores."""
    own = [item for item in request.session.items if item.getparent(pytest.Module) is request.node]
    cases = [item.callspec.params["case"] for item in own if "committed" in item.fixturenames]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {case: pool.submit(commit, case, tmp_path_factory.mktemp("mistake"), tiny, warm_cli_in) for case in cases}
        yield lambda case: futures[case].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name.replace(" ", "_"))
def test_a_mistake_is_one_line_that_helps_and_changes_no_file(case, committed, assert_refused):
    result, unchanged = committed(case)
    assert_refused(result, *case.parts)
    assert unchanged


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES[::12], ids=lambda case: case.name.replace(" ", "_"))
def test_a_mistake_in_a_process_of_its_own_is_told_alike(case, cli_in, tmp_path, tiny, assert_refused):
    result, unchanged = commit(case, tmp_path, tiny, cli_in)
    assert_refused(result, *case.parts)
    assert unchanged


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc, where not even root may make files")
def test_a_folder_without_write_permission_is_refused_before_the_model_is_loaded(cli, assert_refused):
    result = cli("--model=missing.gguf", "--prompt=Hi", "--out=/proc/a.jsonl")
    assert_refused(result, "--out=/proc/a.jsonl", "can't be written")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere; /proc above stands in")
def test_a_file_without_write_permission_is_refused_and_kept(cli, tmp_path, assert_refused):
    (tmp_path / "a.jsonl").write_text("precious\n")
    (tmp_path / "a.jsonl").chmod(0o400)
    assert_refused(cli("--model=missing.gguf", "--prompt=Hi", "--out=a.jsonl"), "a.jsonl", "no write permission")
    assert (tmp_path / "a.jsonl").read_text() == "precious\n"


def test_without_standard_input_and_prompt_the_flags_are_named(shell, assert_refused):
    assert_refused(shell("cli <&-"), "--prompt", "--messages", "--prompt_file", "standard input")


# Help


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpshort", "--helpfull"])
def test_help_names_every_flag_and_is_no_error(flag, cli):
    result = cli(flag)
    assert (result.code, result.err) == (0, "")
    defined = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', FLAGS.read_text())
    assert len(defined) > 20
    shown = re.findall(r"^\s*--(?:\[no\])?(\w+)", result.out, re.MULTILINE)
    assert set(defined) <= set(shown)


def test_list_models_shows_every_preset(cli):
    result = cli("--list_models")
    assert (result.code, result.err) == (0, "")
    assert [line.split()[0] for line in result.out.splitlines()] == sorted(checkpoint.presets())


# The default model, as a newcomer runs it


@pytest.fixture(scope="module")
def golden():
    path = pathlib.Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct.json"
    return {record["prompt"]: record for record in json.loads(path.read_text())["records"]}


def test_json_is_one_object_with_the_golden_tokens(cli, golden):
    record = golden["The capital of France is"]
    result = cli("--prompt", record["prompt"], "--temperature=0", "--raw", "--json", "--max_new_tokens=48")
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    check_schema(answer)
    assert answer["model"] == "smollm2-135m-instruct"
    assert answer["tokens"] == record["greedy_ids"]
    assert answer["text"] == record["text"].removesuffix("<|im_end|>")
    assert (answer["prompt_tokens"], answer["finish_reason"]) == (5, "stop")
    assert summary(result.err.removesuffix("\n")).group("prompt", "held", "new") == ("5", None, "30")


def test_a_question_on_stdin_is_answered_in_text_with_one_line_of_numbers(cli, golden):
    record = golden["What is the capital of France?"]
    result = cli(stdin=record["prompt"].encode() + b"\n")
    assert (result.code, result.out) == (0, "The capital of France is Paris.\n"), result.err
    assert result.err.startswith("[stop] ")
    assert summary(result.err.removesuffix("\n")).group("prompt", "new") == (str(len(record["prompt_ids"])), "8")


# The tiny model: random text, but all of the command line


def test_streamed_text_messages_and_stdin_agree_with_json(warm_cli, tmp_path, tiny):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (tmp_path / "chat.json").write_text("\ufeff" + json.dumps(chat), encoding="utf-8")  # some editors put a byte-order mark first
    common = [tiny.flag, "--max_new_tokens=24", *tiny.ascii_only]
    as_json = warm_cli(*common, "--messages=chat.json", "--json")
    assert as_json.code == 0, as_json.err
    answer = json.loads(as_json.out)
    check_schema(answer)
    assert (answer["model"], answer["finish_reason"], len(answer["text"])) == (tiny.path, "length", 24)
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_tokens"] == len(re.sub(r"<\|\w+\|>", "#", rendered))

    streamed = warm_cli(*common, "--system=Be brief.", stdin=b"Hi\n")
    assert (streamed.code, streamed.out) == (0, answer["text"] + "\n"), streamed.err
    assert streamed.err.startswith("[length] ")
    assert summary(streamed.err.removesuffix("\n")).group("prompt", "new") == (str(answer["prompt_tokens"]), "24")


def test_a_seed_gives_the_same_answer_again_with_its_logprobs_and_stop_cuts_it(warm_cli, tiny):
    args = [tiny.flag, "--prompt=Hi", "--json", "--max_new_tokens=24", "--temperature=1", "--logprobs=2", *tiny.ascii_only]
    whole = warm_cli(*args, "--seed=7")
    assert whole.code == 0, whole.err
    answer = json.loads(whole.out)
    check_schema(answer, "logprobs")
    assert len(answer["text"]) == 24
    assert [list(entry) for entry in answer["logprobs"]] == [["token", "logprob", "top"]] * 24
    assert [entry["token"] for entry in answer["logprobs"]] == answer["tokens"]
    for entry in answer["logprobs"]:
        (first, likeliest), (second, next_likeliest) = entry["top"]
        assert type(first) is int and type(second) is int and 0 >= likeliest >= next_likeliest
        assert entry["logprob"] <= likeliest

    stop = answer["text"][10:13]
    cut = answer["text"].index(stop)
    again = json.loads(warm_cli(*args, "--seed=7", "--stop=#nowhere#", f"--stop={stop}").out)
    assert (again["text"], again["finish_reason"]) == (answer["text"][:cut], "stop")
    assert again["tokens"] == answer["tokens"][: cut + len(stop)]


def test_a_prompt_file_gives_an_object_per_line_in_its_order_with_its_options_and_ids(cli, tmp_path, tiny):
    long_id = {"case": [1, None, "é\u2028日本"]}
    asked = [
        {"prompt": "Hi", "id": "first", "max_new_tokens": 24},
        {"messages": [{"role": "user", "content": "Hi"}], "id": 2, "max_new_tokens": 3, "logprobs": 1},
        {"prompt": "Hi", "temperature": 1, "seed": 7},
        {"prompt": "Hi", "temperature": 1.0, "seed": 8, "id": None},
        {"prompt": "Hi", "temperature": 1, "seed": 7, "id": long_id, "ignore_eos": True, "top_k": 0},
    ]
    half_a_pair = r'{"prompt": "Hi", "max_new_tokens": 1, "id": "\ud800"}'  # no text, but JSON can write it
    # Blank lines, line ends of Windows, and a line separator that JSON allows inside a string.
    text = "\n" + "\r\n\n".join([*(json.dumps(line, ensure_ascii=False) for line in asked), half_a_pair])
    (tmp_path / "in.jsonl").write_bytes(text.encode())
    target = tmp_path / "out.jsonl"
    target.write_text("old\n")
    target.chmod(0o640)
    (tmp_path / "link.jsonl").symlink_to(target)
    args = [tiny.flag, "--prompt_file=in.jsonl", "--max_new_tokens=12", "--batch_size=2", *tiny.ascii_only]
    with target.open() as before:
        result = cli(*args, "--out=link.jsonl", "--json", env={"PYTHONIOENCODING": "ascii"})  # as under LC_ALL=C
        assert before.read() == "old\n", "it was written over, not replaced"
    assert result.code == 0, result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link.jsonl", "out.jsonl"]
    assert (tmp_path / "link.jsonl").is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert summary(result.err.removesuffix("\n")).group("new") == str(24 + 3 + 3 * 12 + 1)

    answers = [json.loads(line) for line in target.read_bytes().decode().removesuffix("\n").split("\n")]
    assert json.loads(result.out) == answers
    assert [answer.pop("id", "none") for answer in answers] == ["first", 2, "none", None, long_id, "\ud800"]
    for answer in answers:
        check_schema(answer, *(["logprobs"] if answer is answers[1] else []))
    assert [len(answer["tokens"]) for answer in answers] == [24, 3, 12, 12, 12, 1]
    assert answers[0]["tokens"][:3] == answers[1]["tokens"]
    assert answers[2]["tokens"] == answers[4]["tokens"] != answers[3]["tokens"]
    assert answers[2]["tokens"] != answers[0]["tokens"][:12]


def test_stats_tell_what_the_cache_takes_and_holds(warm_cli, tiny):
    result = warm_cli(tiny.flag, "--prompt=Hello", "--raw", "--kv=int4", "--kv_group=8", "--max_new_tokens=3", "--stats")
    assert result.code == 0, result.err
    *table, line, numbers = result.err.splitlines()
    assert table[1].split()[:5] == ["2", "dense:", "k,", "v", "int4"]
    # Two layers of two heads of 8 + 8 channels: in bf16 2 * 2 * 16 * 2 = 128 bytes; in int4 half a byte each, and a scale and a
    # minimum of 2 bytes per 8.
    assert line == "KV cache int4: 64 bytes per token (0.500 of bf16's 128), 1 row of 512 tokens"
    assert summary(numbers)


def test_prompts_of_a_file_share_pages(warm_cli, tmp_path, tiny):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Hello there, {name}"}) + "\n" for name in ("Ann", "Bob")))
    common = (tiny.flag, "--prompt_file=in.jsonl", "--raw", "--json", "--max_new_tokens=6")
    plain = warm_cli(*common)
    shared = warm_cli(*common, "--cache=paged", "--page_size=4", "--prefix_cache", "--stats")
    assert (plain.code, shared.code) == (0, 0), shared.err
    assert [answer["tokens"] for answer in json.loads(shared.out)] == [answer["tokens"] for answer in json.loads(plain.out)]
    assert "prefix cache: 2 lookups, 12 tokens hit, 20 missed" in shared.err
    assert "(12 held)" in shared.err


def test_a_character_that_the_terminal_lacks_is_shown_as_a_question_mark(cli, tiny):
    result = cli(tiny.flag, "--prompt=Hi", "--max_new_tokens=3", tiny.accents_only, env={"PYTHONIOENCODING": "ascii"})
    assert (result.code, result.out) == (0, "???\n"), result.err


# Chat


def test_a_chat_keeps_what_it_holds_and_prefills_only_the_new_turn(cli, tiny):
    turns = ["Hi", "And now?", "Well."]
    stdin = "\n".join(turns).encode()  # the last without its line end
    result = cli(tiny.flag, "--task=chat", "--max_new_tokens=20", *tiny.ascii_only, stdin=stdin)
    assert result.code == 0, result.err
    assert len(result.out) == 3 * 21, "three answers of 20 characters, each with its line end"
    greeting, *statuses = result.err.rstrip("\n").split("\n")
    assert "Ctrl-C" in greeting and "Ctrl-D" in greeting
    numbers = [summary(status) for status in statuses]
    assert len(numbers) == 3
    held, total = None, 0
    for turn, match in zip(turns, numbers, strict=True):
        total += len("#" + "user\n" + turn + "#\n" + "#" + "assistant\n")
        assert match.group("prompt", "held", "new") == (str(total), held, "20")
        held = str(total + 19)  # the last token was not fed back
        total += len(20 * "x" + "#\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_on_the_terminal_stops_the_answer_and_keeps_the_chat(start, tiny):
    import pty

    controller, terminal = pty.openpty()
    try:
        session = start("--task=chat", tiny.flag, *ENDLESS, *tiny.ascii_only, python=["-c", ON_TERMINAL], stdin=terminal)
        session.wait_for(lambda: "Ctrl-D" in session.err, "the greeting")
        os.write(controller, b"Tell me a long story.\n")
        session.wait_for(lambda: len(session.out) > 20, "an answer")
        os.write(controller, b"\x03")
        session.wait_for(lambda: "[interrupted]" in session.err, "the end of the answer")
        stopped = len(session.out)
        held = int(re.search(r"\[interrupted\] (\d+) tokens held", session.err)[1])
        assert 40 < held < 7500, "it came to its own end"
        os.write(controller, b"Go on.\n")
        session.wait_for(lambda: len(session.out) > stopped + 20, "the next answer")
        os.write(controller, b"\x03")
        session.wait_for(lambda: session.err.count("[interrupted]") == 2, "the end of the next answer")
        assert int(re.findall(r"(\d+) tokens held", session.err)[1]) > held
        os.write(controller, b"\x04")
        result = session.end()
    finally:
        os.close(controller)
        os.close(terminal)
    assert result.code == 0
    assert "Traceback" not in result.err


def test_ctrl_c_while_the_chat_waits_for_a_turn_ends_it(start, tiny):
    session = start("--task=chat", tiny.flag)
    session.wait_for(lambda: "Ctrl-D" in session.err, "the greeting")
    session.interrupt()
    result = session.end()
    assert result.code == 130
    assert "Traceback" not in result.err


# Evaluation


def test_an_evaluation_compares_weights_and_prints_only_its_result(warm_cli, tmp_path, tiny):
    text = "All work and no play makes Jack a dull boy.\n" * 4
    (tmp_path / "text.txt").write_bytes(text.encode())
    args = ["--task=eval", tiny.flag, "--text_file=text.txt", "--window=64", "--stride=48"]
    as_json, table = warm_cli(*args, "--weights=bf16", "--against=f32", "--json"), warm_cli(*args, "--max_tokens=100")
    assert (as_json.code, as_json.err, table.code, table.err) == (0, "", 0, "")
    found = json.loads(as_json.out)
    assert [found[key] for key in ("text", "tokens", "bytes", "window", "stride")] == ["text.txt", 4 * 44 - 1, 4 * 44 - 1, 64, 48]
    assert list(found["candidates"]) == ["f32", "bf16"]
    f32, bf16 = found["candidates"].values()
    assert f32["model"] == bf16["model"] == tiny.path
    assert f32["bits_per_byte"] == pytest.approx(math.log2(f32["perplexity"]), rel=1e-6)  # a byte a token
    assert bf16["weight_bytes"] < 0.6 * f32["weight_bytes"]
    assert "against" not in f32 and 1e-7 < bf16["against"]["mean_kl"] < 1e-2
    assert bf16["against"]["perplexity_ratio"] == pytest.approx(bf16["perplexity"] / f32["perplexity"], rel=1e-6) != 1

    first, _, line = table.out.splitlines()
    assert first == f"{tiny.path} on text.txt: 100 tokens of 100 bytes, in windows of 64 tokens, stride 48"
    assert line.split()[0] == "auto"
    assert f32["perplexity"] / 2 < float(line.split()[1]) < 2 * f32["perplexity"]


# Ctrl-C


def test_ctrl_c_ends_an_answer_and_keeps_its_text(start, tiny):
    session = start(tiny.flag, "--prompt=Hi", *ENDLESS, *tiny.ascii_only)
    session.wait_for(lambda: len(session.out) > 20, "an answer")
    session.interrupt()
    result = session.end()
    assert result.code == 130
    assert 20 < len(result.out) < 7500 and result.out.endswith("\n")
    assert len(result.err.splitlines()) == 1 and ("interrupted" in result.err or "cancelled" in result.err)


def test_ctrl_c_keeps_every_answer_of_a_file_so_far(start, tmp_path, tiny):
    """A finished one, one under way, and one that was not begun, which is left out."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi", "max_new_tokens": 5}\n{"prompt": "Hi"}\n{"prompt": "Hi", "id": "not begun"}\n')
    args = [tiny.flag, "--prompt_file=in.jsonl", "--out=out.jsonl", "--batch_size=2", *ENDLESS, *tiny.ascii_only]
    session = start(*args, env={"JAX_LOG_COMPILES": "1"})
    session.wait_for(lambda: IN_DECODE in session.err, "the decode loop")
    session.runs_for(1)
    session.interrupt()
    result = session.end()
    assert result.code == 130, "it went on to the end"
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(answer["finish_reason"], len(answer["tokens"]) > 5) for answer in answers] == [("length", False), ("cancelled", True)]
    assert len(answers[1]["text"]) == len(answers[1]["tokens"]) < 7500
    assert "Traceback" not in result.err


def test_ctrl_c_keeps_the_json_of_an_answer_so_far(start, tiny):
    session = start(tiny.flag, "--prompt=Hi", "--json", *ENDLESS, *tiny.ascii_only, env={"JAX_LOG_COMPILES": "1"})
    session.wait_for(lambda: IN_DECODE in session.err, "the decode loop")
    session.runs_for(1)
    session.interrupt()
    result = session.end()
    assert result.code == 130, "it went on to the end"
    answer = json.loads(result.out)
    check_schema(answer)
    assert answer["finish_reason"] == "cancelled"
    assert 0 < len(answer["text"]) == len(answer["tokens"]) < 7500


def test_ctrl_c_while_modules_are_imported_is_no_traceback(start):
    session = start("--prompt=Hi", "--model=missing.gguf", python=["-X", "importtime"])
    session.wait_for(lambda: re.search(r"\| +numpy\n", session.err), "the import of NumPy, with JAX still to come")
    session.interrupt()
    result = session.end()
    assert result.code in (130, -2)  # a shell shows both as 130
    assert "Traceback" not in result.err and "KeyboardInterrupt" not in result.err


# Standard output that is closed, or full


@pytest.mark.parametrize("flag", ["--help", "--list_models", "--json", "--nojson"])
def test_a_reader_that_went_away_is_no_traceback(flag, start, tiny):
    readable, writable = os.pipe()
    os.close(readable)
    try:
        session = start(tiny.flag, "--prompt=Hi", flag, "--max_new_tokens=24", stdout=writable)
    finally:
        os.close(writable)
    result = session.end()
    assert result.code == 141  # as the shell shows a process that SIGPIPE ended
    assert not re.search("Traceback|Exception|BrokenPipe", result.err), result.err


def test_a_reader_that_goes_away_in_the_middle_ends_the_answer(shell, tiny):
    result = shell('{ cli "$@"; echo "code $?" >&2; } | head -c 5', tiny.flag, "--prompt=Hi", *ENDLESS, *tiny.ascii_only)
    assert len(result.out) == 5
    assert result.err == "code 141\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["--help", "--json", "--nojson"])
def test_a_full_disk_under_standard_output_is_one_line(flag, shell, tiny, assert_refused):
    result = shell('cli "$@" >/dev/full', tiny.flag, "--prompt=Hi", flag, "--max_new_tokens=24")
    assert_refused(result, "No space left on device")
