"""SentencePiece vocabularies, out of GGUF metadata and as tokenizer.model, against the library itself."""

import json
import re
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from runtime import UserError
from tokenizer import StreamingDetokenizer, tokenizer_from_folder, tokenizer_from_gguf

any_case = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
# Words of the training text, runs that can be merged in several ways, and what needs bytes.
SOME_TEXT = st.lists(
    st.sampled_from(["the ", " in", "aaaa", "ssss", "----", " ", "  ", "\n", "é", "日本", "👩‍👩‍👧", "e\u0301", "x1", "▁", "<0x41>"])
).map("".join)


def gguf(model: bytes, **changes) -> dict:
    """The metadata that a converter makes of a SentencePiece model."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    plain = {
        "model": "llama",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in plain.items() if value is not None}


@pytest.fixture(scope="module", params=[True, False], ids=["space first", "no space first"])
def pair(request, train_sentencepiece):
    """The library's own tokenizer, and ours out of GGUF metadata."""
    model = train_sentencepiece("bpe", add_dummy_prefix=request.param)
    return sentencepiece.SentencePieceProcessor(model_proto=model), tokenizer_from_gguf(gguf(model))


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder_pair(request, train_sentencepiece, tmp_path_factory):
    """Likewise, out of a folder with a tokenizer.model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = train_sentencepiece(request.param, add_dummy_prefix=True)
    (folder / "tokenizer.model").write_bytes(model)
    return sentencepiece.SentencePieceProcessor(model_proto=model), tokenizer_from_folder(folder)


@any_case
@given(text=SOME_TEXT | st.text())
def test_ids_and_texts_are_those_of_the_library(pair, text):
    theirs, ours = pair
    ids = ours.encode(text, add_bos=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")


@any_case
@given(text=SOME_TEXT | st.text())
def test_ids_and_texts_of_a_folder_are_those_of_the_library(folder_pair, text):
    theirs, ours = folder_pair
    ids = ours.encode(text, add_bos=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("▁", " ")


@any_case
@given(data=st.data())
def test_any_ids_stream_to_the_whole_decode(pair, data):
    _, ours = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1) | st.integers(5, 260), max_size=40))  # bytes more often
    skip = data.draw(st.booleans())
    detokenizer = StreamingDetokenizer(ours, skip_special=skip)
    chunks = [*(detokenizer.push([id]) for id in ids), detokenizer.flush()]
    assert "".join(chunks) == ours.decode(ids, skip_special=skip)


def test_only_the_first_space_of_a_text_is_dropped(train_sentencepiece):
    model = train_sentencepiece("bpe", add_dummy_prefix=True)
    ours = tokenizer_from_gguf(gguf(model))
    space = ours.pieces.index(b" ", 300)
    assert ours.decode([space, space]) == " "
    assert ours.decode([1, space, space]) == " "  # BOS is no text
    assert ours.decode([1, space], skip_special=False) == "<s> "
    detokenizer = StreamingDetokenizer(ours)
    assert [detokenizer.push([id]) for id in (1, space, space)] == ["", "", " "]
    assert detokenizer.flush() == ""
    assert detokenizer.push([space]) == ""  # a new text


def test_control_tokens_are_parsed_only_when_asked(pair):
    theirs, ours = pair
    end = theirs.piece_to_id("<|im_end|>")
    assert ours.encode("<|im_end|>", parse_special=True) == [1, end]
    assert end not in ours.encode("a<|im_end|>b</s>")
    assert ours.encode("a<|im_end|>b</s>") == [1, *theirs.encode("a<|im_end|>b</s>")]
    assert ours.encode("the<|im_end|>the", parse_special=True) == [1, *theirs.encode("the"), end, *theirs.encode("the")]
    assert ours.decode([end]) == "" and ours.decode([end], skip_special=False) == "<|im_end|>"


def test_user_defined_tokens_are_one_token_either_way(pair):
    theirs, ours = pair
    own = theirs.piece_to_id("<think>")
    assert ours.encode("<think>", add_bos=False) == ours.encode("<think>", add_bos=False, parse_special=True) == [own]
    assert ours.decode([own]) == "<think>"


def test_a_space_is_put_before_each_part_or_the_first_one_as_the_folder_says(train_sentencepiece, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece("bpe", add_dummy_prefix=True))
    text = "the</s>the"
    parts = {}
    for legacy in (True, False, None):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({} if legacy is None else {"legacy": legacy}))
        ids = tokenizer_from_folder(tmp_path).encode(text, parse_special=True, add_bos=False)
        parts[legacy] = (ids[: ids.index(2)], ids[ids.index(2) + 1 :])
    assert parts[False] == parts[None] and parts[True][0] == parts[True][1]
    assert parts[False][0] == parts[True][0] != parts[False][1]


def test_white_space_after_a_control_token_goes_where_the_model_is_phi_3(train_sentencepiece):
    metadata = gguf(train_sentencepiece("bpe", add_dummy_prefix=False))
    plain, phi = tokenizer_from_gguf(metadata), tokenizer_from_gguf({**metadata, "general.architecture": "phi3"})
    assert phi.encode("<|im_end|>\n the", parse_special=True) == plain.encode("<|im_end|>the", parse_special=True)
    assert phi.encode("<s>\nthe", parse_special=True) == plain.encode("<s>\nthe", parse_special=True)


def test_a_vocabulary_without_bytes_refuses_what_it_can_not_write(train_sentencepiece):
    ours = tokenizer_from_gguf(gguf(train_sentencepiece("bpe", add_dummy_prefix=True, byte_fallback=False)))
    assert ours.decode(ours.encode("the end")) == "the end"
    with pytest.raises(UserError, match="no token for '日', character 4 of the prompt: remove it"):
        ours.encode("the 日")
    with pytest.raises(UserError, match="no token for '日'"):
        ours.encode("the 日", parse_special=True)
    assert ours.encode("<unk>", parse_special=True) == [1, 0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scores": None}, "tokens but 0 scores"),
        ({"scores": [0.0]}, "tokens but 1 scores"),
        ({"unknown_token_id": -1}, "tokenizer.ggml.unknown_token_id is -1"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_file(train_sentencepiece, changes, message):
    metadata = gguf(train_sentencepiece("bpe", add_dummy_prefix=True), **changes)
    with pytest.raises(UserError, match=re.escape("models/x.gguf: ") + ".*" + re.escape(message)):
        tokenizer_from_gguf(metadata, Path("models/x.gguf"))


def test_tokens_that_the_library_refuses_are_an_error(train_sentencepiece):
    metadata = gguf(train_sentencepiece("bpe", add_dummy_prefix=True))
    metadata["tokenizer.ggml.tokens"][400] = metadata["tokenizer.ggml.tokens"][401]
    with pytest.raises(UserError, match="tokens do not fit together"):
        tokenizer_from_gguf(metadata)
    metadata["tokenizer.ggml.tokens"][400] = "unique"
    metadata["tokenizer.ggml.token_type"] = [3 if type == 2 else type for type in metadata["tokenizer.ggml.token_type"]]
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(UserError, match="names no unknown token"):
        tokenizer_from_gguf(metadata)


def test_gemma_3_prompts_and_answers_are_those_of_transformers():
    """Of its 262,144 tokens those that can occur in these texts, so that the merges are the same."""
    recorded = json.loads((Path(__file__).parent / "gemma3-270m.json").read_text(encoding="utf-8"))
    ids, tokens, scores, types = (list(column) for column in zip(*recorded["tokens"], strict=True))
    place = {id: index for index, id in enumerate(ids)}
    parts = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "unknown_token_id": place[3]}
    parts |= {"bos_token_id": place[2], "eos_token_id": place[1], "add_space_prefix": False, "add_bos_token": True}
    gemma = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in parts.items()})
    assert gemma.eos_ids == {place[1], place[106]}
    for record in recorded["records"]:
        assert [ids[index] for index in gemma.encode(record["prompt"])] == record["prompt_ids"]
        assert gemma.decode([place[id] for id in record["greedy_ids"]], skip_special=False) == record["text"]
