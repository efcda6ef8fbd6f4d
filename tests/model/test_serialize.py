"""A config becomes JSON and comes back equal; what is not a config is refused by name."""

import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import model.config
from model import LayerConfig, MLPConfig, Rope, serialize
from model.serialize import from_dict, to_dict
from runtime import UserError

POSITIVE = st.floats(min_value=5e-324, allow_infinity=False)


def through_json(config):
    return from_dict(json.loads(json.dumps(to_dict(config), allow_nan=False)))


def varied(layer: LayerConfig, theta, hidden) -> LayerConfig:
    rope = None if theta is None else dataclasses.replace(layer.attention.rope, theta=theta)
    return dataclasses.replace(
        layer, attention=dataclasses.replace(layer.attention, rope=rope), mlp=dataclasses.replace(layer.mlp, hidden=hidden)
    )


@given(
    runs=st.lists(st.tuples(st.none() | POSITIVE, st.integers(1, 2**40), st.integers(1, 6)), max_size=5),
    eps=POSITIVE,
    tie=st.booleans(),
    vocab=st.integers(1, 2**40),
)
def test_a_config_comes_back_equal(tiny_config, runs, eps, tie, vocab):
    layers = tuple(varied(tiny_config.layers[0], theta, hidden) for theta, hidden, count in runs for _ in range(count))
    config = dataclasses.replace(tiny_config, layers=layers, norm_eps=eps, tie_embeddings=tie, vocab_size=vocab)
    back = through_json(config)
    assert back == config and hash(back) == hash(config)
    assert repr(back) == repr(config)  # the same types, too


def test_a_run_of_equal_layers_stands_once(tiny_config):
    a, b = tiny_config.layers[0], varied(tiny_config.layers[0], None, 7)
    data = to_dict(dataclasses.replace(tiny_config, layers=(a, a, a, b, a)))
    assert [entry.get("repeat") for entry in data["layers"]] == [3, None, None]
    assert data["class"] == "ModelConfig" and data["layers"][0]["of"] == data["layers"][2]
    assert to_dict(from_dict(data)) == data


def test_a_run_written_out_is_the_same(tiny_config):
    data = to_dict(tiny_config)
    written_out = data | {"layers": [data["layers"][0]["of"]] * 3}
    assert from_dict(written_out) == tiny_config


@pytest.fixture
def novel(monkeypatch):
    """A class that `model.config` may have one day."""

    @dataclasses.dataclass(frozen=True)
    class Novel(MLPConfig):
        kinds: tuple[Rope | None, ...] = ()
        shape: tuple[int, float] = (1, 1.0)
        activation: typing.Literal["silu", "gelu"] = "silu"
        scale: float | None = None

    monkeypatch.setattr(model.config, "Novel", Novel, raising=False)
    serialize._classes.cache_clear()
    yield Novel
    serialize._classes.cache_clear()


@pytest.fixture
def novel_config(novel, tiny_config):
    mlp = novel(hidden=8, kinds=(Rope(theta=1.5, dim=4), None, None), shape=(np.int64(3), 0.5), scale=np.float32(0.1))
    return dataclasses.replace(tiny_config, layers=(dataclasses.replace(tiny_config.layers[0], mlp=mlp),) * 2)


def test_a_class_that_is_added_to_the_configs_needs_no_change(novel_config):
    assert through_json(novel_config) == novel_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": [to_dict(MLPConfig(hidden=1))]}, "kinds is .*, no tuple"),
        ({"shape": [1]}, r"shape is \(1,\), no tuple\[int, float\]"),
        ({"shape": [1.5, 1.5]}, "shape is"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"scale": "big"}, "scale is 'big', no float | None"),
        ({"scale": True}, "scale is True"),
    ],
)
def test_a_value_must_be_what_the_field_says(novel_config, change, message):
    data = to_dict(novel_config)
    data["layers"][0]["of"]["mlp"].update(change)
    with pytest.raises(UserError, match=message):
        from_dict(data)


def changed(data, path, value):
    """A copy with the value at `path` replaced, or taken out where it is `...`."""
    data = json.loads(json.dumps(data))
    *way, last = path
    place = data
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["class"], "Encoder", "has class 'Encoder', which is unknown"),
        (["class"], ..., "has class None, which is unknown"),
        (["class"], ["ModelConfig"], "which is unknown"),
        (["class"], "Rope", r"ModelConfig \(Rope\) has unknown field 'context_length'"),
        (["novelty"], 1, r"ModelConfig \(ModelConfig\) has unknown field 'novelty'"),
        (["vocab_size"], ..., r"ModelConfig \(ModelConfig\) lacks field 'vocab_size'"),
        (["vocab_size"], "101", "ModelConfig.vocab_size is '101', no int"),
        (["vocab_size"], 101.0, "ModelConfig.vocab_size is 101.0, no int"),
        (["tie_embeddings"], 1, "ModelConfig.tie_embeddings is 1, no bool"),
        (["norm_eps"], None, "ModelConfig.norm_eps is None, no float"),
        (["layers"], 3, "ModelConfig.layers is 3, no tuple"),
        (["layers", 0, "repeat"], 0, r"layers\[0\] repeats 0 times"),
        (["layers", 0, "repeat"], 10**9, r"repeats 1000000000 times \(1 to 10000"),
        (["layers", 0, "repeat"], True, "repeats True times"),
        (["layers", 0, "of"], to_dict(MLPConfig(hidden=1)), "ModelConfig.layers is"),
        (["layers", 0, "of", "mlp"], ..., r"layers\[0\] \(LayerConfig\) lacks field 'mlp'"),
        (["layers", 0, "of", "mlp", "class"], "Mixture", r"layers\[0\].mlp has class 'Mixture', which is unknown"),
        (["layers", 0, "of", "attention", "num_kv_heads"], 4, "num_heads 6 is not a multiple of num_kv_heads 4"),
        (["layers", 0, "of", "attention", "num_kv_heads"], 0, r"layers\[0\].attention: "),
    ],
)
def test_what_is_no_config_is_refused_by_name(tiny_config, path, value, message):
    with pytest.raises(UserError, match=message) as caught:
        from_dict(changed(to_dict(tiny_config), path, value), "here/diptych.json")
    assert str(caught.value).startswith("here/diptych.json is no model that")
    assert "convert the model again" in str(caught.value)


@pytest.mark.parametrize("data", [None, [], 3, "ModelConfig", {}, [{}]])
def test_another_kind_of_value_is_refused(data):
    with pytest.raises(UserError, match="is no model that this version of Diptych knows"):
        from_dict(data)


def test_all_problems_are_told_at_once_but_not_hundreds(tiny_config):
    data = changed(changed(to_dict(tiny_config), ["vocab_size"], ...), ["novelty"], 1)
    with pytest.raises(UserError, match=r"'novelty'.*'vocab_size'"):
        from_dict(data)
    with pytest.raises(UserError, match="and 93 more"):
        from_dict(data | {f"field{i}": 0 for i in range(99)})


def test_endless_nesting_is_refused(tiny_config):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UserError, match="nested too deeply"):
        from_dict(to_dict(tiny_config) | {"layers": nested})


@pytest.mark.parametrize("value", [math.inf, math.nan, object(), {"a": 1}, [1], b"x", 1.5, "many"])
def test_a_value_that_would_not_come_back_is_refused_when_it_is_stored(tiny_config, value):
    with pytest.raises(TypeError, match="vocab_size"):
        to_dict(dataclasses.replace(tiny_config, vocab_size=value))


def test_a_dataclass_from_elsewhere_is_refused_when_it_is_stored(tiny_config):
    @dataclasses.dataclass(frozen=True)
    class Rope:  # the name of one of ours does not make it ours
        theta: float
        dim: int

    layer = tiny_config.layers[0]
    foreign = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rope=Rope(1.0, 4)))
    with pytest.raises(TypeError, match="rope holds"):
        to_dict(dataclasses.replace(tiny_config, layers=(foreign,)))
