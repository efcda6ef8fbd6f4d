"""Tokenizers out of Hugging Face model folders."""

import json
import re
import time

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from runtime import UserError
from tokenizer import StreamingDetokenizer, tokenizer_from_folder
from tokenizer.pieces import byte_alphabet

any_case = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
TEXT = st.text() | st.lists(st.sampled_from(["the ", "in", "  ", "é", "👩‍👩‍👧", "日本", "\n", "e\u0301", "12"])).map("".join)


@pytest.fixture(scope="session")
def byte_level(english) -> str:
    """A tokenizer.json as those of GPT-2's kind, with BOS put first by its post-processor."""
    native = tokenizers.Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=byte_alphabet(), special_tokens=SPECIAL, show_progress=False)
    native.train_from_iterator(english.split("\n"), trainer)
    native.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    native.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    native.enable_truncation(4)
    native.enable_padding(length=16)
    return native.to_str()


@pytest.fixture(scope="session")
def metaspace(english) -> str:
    """A tokenizer.json as those made of SentencePiece models: bytes for what has no token, a space put first."""
    native = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    native.normalizer = normalizers.Replace(" ", "▁")
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    native.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False)
    native.train_from_iterator((word for line in english.split("\n") for word in line.split(" ")), trainer)
    definition = json.loads(native.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] not in bytes_]
    return json.dumps(definition)


@pytest.fixture
def write(tmp_path):
    """Writes a model folder: names without suffix are JSON."""

    def write(tokenizer_json: str | None, **files):
        if tokenizer_json is not None:
            (tmp_path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def pair(request, tmp_path_factory):
    """The package's own tokenizer, and ours."""
    definition = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = tokenizers.Tokenizer.from_str(definition)
    theirs.no_truncation()
    theirs.no_padding()
    return theirs, tokenizer_from_folder(folder)


@any_case
@given(text=TEXT)
def test_ids_and_texts_are_those_of_the_package(pair, text):
    theirs, ours = pair
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_bos=False) == ids
    assert ours.decode(ids) == theirs.decode(ids)
    if theirs.normalizer is None:
        assert ours.decode(ids) == text
    elif not text.startswith((" ", "▁")):  # the package puts no second space first
        assert ours.decode(ids) == text.replace("▁", " ")


@any_case
@given(data=st.data())
def test_any_ids_stream_to_the_whole_decode(pair, data):
    _, ours = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = StreamingDetokenizer(ours, skip_special=skip)
    chunks = [*(detokenizer.push([id]) for id in ids), detokenizer.flush()]
    assert "".join(chunks) == ours.decode(ids, skip_special=skip)


def test_control_tokens_are_parsed_only_when_asked(pair):
    theirs, ours = pair
    end = theirs.token_to_id("<|im_end|>")
    text = "a<|im_end|>b"
    assert ours.encode(text, parse_special=True) == theirs.encode(text).ids
    assert end not in ours.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_nothing_is_cut_off_or_padded_whatever_the_file_asks(write, byte_level):
    ours = tokenizer_from_folder(write(byte_level, tokenizer_config={"bos_token": "<s>"}))
    assert ours.decode(ours.encode("a text of more than four tokens")) == "a text of more than four tokens"
    assert ours.encode("") == [0]


def test_bos_is_added_as_the_post_processor_does_unless_the_configuration_says_otherwise(write, byte_level):
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    assert tokenizer_from_folder(write(byte_level, tokenizer_config=names)).encode("") == [0]
    assert tokenizer_from_folder(write(byte_level, tokenizer_config={**names, "add_bos_token": False})).encode("") == []
    both = {**names, "add_bos_token": True, "add_eos_token": True}
    assert tokenizer_from_folder(write(byte_level, tokenizer_config=both)).encode("") == [0, 1]


def test_the_small_files_give_ids_in_their_order(write, byte_level):
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
    folder = write(
        byte_level,
        tokenizer_config=names,
        special_tokens_map={"pad_token": "<|im_end|>", "eos_token": "<s>"},
        generation_config={"eos_token_id": [2, 5]},
        config={"eos_token_id": 7, "bos_token_id": 8},
    )
    ours = tokenizer_from_folder(folder)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (0, 1, 2)
    assert ours.eos_ids == {1, 2, 5, 7}
    assert ours.special_ids == {0, 1, 2}


def test_without_names_the_ids_of_the_configuration_count(write, byte_level):
    ours = tokenizer_from_folder(write(byte_level, config={"text_config": {"eos_token_id": [1, 2], "bos_token_id": 0}}))
    assert (ours.bos_id, ours.eos_id, ours.eos_ids) == (0, 1, {1, 2})


def test_tokens_listed_only_in_the_configuration_are_added(write, byte_level):
    size = tokenizers.Tokenizer.from_str(byte_level).get_vocab_size()
    listed = {
        str(size): {"content": "<extra>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    }
    ours = tokenizer_from_folder(write(byte_level, tokenizer_config={"added_tokens_decoder": listed, "bos_token": "<s>"}))
    assert ours.encode("a<extra>", parse_special=True)[-1] == size == ours.vocab_size - 1
    assert ours.token_bytes(size) == b"<extra>" and size in ours.special_ids


def test_what_looks_like_a_control_token_is_one(write, byte_level):
    definition = json.loads(byte_level)
    definition["added_tokens"] = [{**token, "special": token["content"] == "<s>"} for token in definition["added_tokens"]]
    ours = tokenizer_from_folder(write(json.dumps(definition), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    assert ours.special_ids == {0, 1, 2}  # eos by its name, <|im_end|> by its looks
    assert ours.backend.controls.keys() == set(SPECIAL)


def test_chat_templates_are_found_and_the_file_wins(write, byte_level):
    def render(folder, **kwargs):
        return tokenizer_from_folder(folder).chat.render([{"role": "user", "content": "x"}], **kwargs)

    names = {"bos_token": "<s>"}
    assert render(write(byte_level, tokenizer_config={**names, "chat_template": "{{ bos_token }}one"})) == "<s>one"
    listed = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    folder = write(byte_level, tokenizer_config={**names, "chat_template": listed})
    assert render(folder) == render(folder, tools=[]) == "two"
    assert render(folder, tools=[{"name": "f"}]) == "tools"
    (folder / "chat_template.jinja").write_text("three")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("four")
    assert render(folder) == "three"
    assert render(folder, tools=[{"name": "f"}]) == "four"


def test_a_folder_without_template_has_none(write, byte_level):
    assert tokenizer_from_folder(write(byte_level, tokenizer_config={"bos_token": "<s>"})).chat is None


CONFIG = {"bos_token": "<s>"}


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer_config": "{"}, "tokenizer_config.json can't be read as JSON"),
        ({"tokenizer_config": [1]}, "tokenizer_config.json holds a list, not an object"),
        (
            {"generation_config": "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")},
            "generation_config.json can't be read as JSON",
        ),
        ({"tokenizer_config": {"bos_token": 7}}, "tokenizer_config.json has a bos_token that is no text"),
        ({"tokenizer_config": {"bos_token": "<none>"}}, "names '<none>' as BOS token, but the vocabulary has none such"),
        ({"tokenizer_config": {**CONFIG, "add_bos_token": "yes"}}, "tokenizer_config.json has add_bos_token 'yes', not true or false"),
        ({"tokenizer_config": {**CONFIG, "add_eos_token": True}}, "asks for a EOS token but names none"),
        ({"tokenizer_config": {"bos_token": "</s>"}}, "puts ids [0] around a text, not its BOS token"),
        ({"tokenizer_config": CONFIG, "generation_config": {"eos_token_id": [9999]}}, "generation_config.json has eos_token_id 9999, but"),
        (
            {"tokenizer_config": CONFIG, "config": {"eos_token_id": "x"}},
            "config.json has eos_token_id 'x', but the tokenizer's ids go from 0",
        ),
        ({"tokenizer_config": {**CONFIG, "chat_template": 7}}, "tokenizer_config.json has a chat template that is no text"),
        ({"tokenizer_config": {**CONFIG, "chat_template": [7]}}, "tokenizer_config.json lists chat templates wrongly"),
        ({"tokenizer_config": {**CONFIG, "chat_template": [{"name": "rag", "template": "x"}]}}, "named rag, but none named default"),
        ({"tokenizer_config": {**CONFIG, "added_tokens_decoder": {"x": {}}}}, "lists added tokens wrongly"),
        ({"tokenizer_config": CONFIG, "added_tokens": {"</s>": 5}}, "gives token '</s>' id 5, but in tokenizer.json it has 1"),
        ({"tokenizer_config": CONFIG, "added_tokens": {"<new>": 5}}, "lists added token '<new>' with id 5, but the next id"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(write, byte_level, files, message):
    folder = write(byte_level, **files)
    with pytest.raises(UserError, match=re.escape(str(folder)) + ".*" + re.escape(message)) as caught:
        tokenizer_from_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_says_what_is_missing(write, tmp_path):
    with pytest.raises(UserError, match=r"holds neither tokenizer.json nor tokenizer.model: download one"):
        tokenizer_from_folder(write(None))
    with pytest.raises(UserError, match="nowhere is no folder"):
        tokenizer_from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "GPT"}}', "\x00\x01"])
def test_a_damaged_tokenizer_json_names_the_file(write, content):
    with pytest.raises(UserError, match=r"tokenizer.json is no tokenizer that the tokenizers package can read"):
        tokenizer_from_folder(write(content))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 99])
def test_a_damaged_tokenizer_model_names_the_file(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer.model is no SentencePiece model"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": None}, "does not say how tokens are decoded"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decodes with WordPiece, which is not supported"),
        ({"decoder": {"type": "Fuse"}}, "leaves characters that are not in its vocabulary out without a word"),
    ],
)
def test_a_kind_that_is_not_supported_is_refused(write, byte_level, changes, message):
    with pytest.raises(UserError, match=message):
        tokenizer_from_folder(write(json.dumps({**json.loads(byte_level), **changes})))


def test_a_token_added_to_a_sentencepiece_model_must_have_an_id_of_its_own(train_sentencepiece, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece("bpe", add_dummy_prefix=True))
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 702}')
    ours = tokenizer_from_folder(tmp_path)
    assert ours.encode("<|new|>", parse_special=True, add_bos=False) == [702]
    assert ours.vocab_size == 703 and ours.token_bytes(701) == b""
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 400}')
    with pytest.raises(UserError, match=r"gives id 400 to token '<\|new\|>', but in tokenizer.model it is"):
        tokenizer_from_folder(tmp_path)


def test_streaming_takes_time_in_proportion_to_the_text(pair):
    _, ours = pair
    ids = ours.encode("the end of the line ") * 20

    def seconds(times: int) -> float:
        detokenizer = StreamingDetokenizer(ours)
        began = time.process_time()
        for id in ids * times:
            detokenizer.push([id])
        return time.process_time() - began

    seconds(10)
    assert seconds(400) < 40 * max(seconds(40), 1e-3)  # ten times the text; a hundred times the work if each push read all of it
