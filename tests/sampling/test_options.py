"""What a request may ask for, and how a batch's requests become arrays."""

import math
import re

import jax
import numpy as np
import pytest

from runtime import UserError
from sampling.options import BIAS_SLOTS, MAX_LOGPROBS, STOP_TOKEN_SLOTS, SamplingOptions, SamplingParams

BAD = [
    *(("temperature", value, "a number from 0 to 1000") for value in (-1, -1e-9, math.nan, math.inf, 1000.1, True, None, "1", [1.0])),
    *(("top_p", value, "a number above 0 to 1") for value in (0, 0.0, -0.1, 1.5, math.nan, math.inf, True, "0.9", None)),
    *(("top_k", value, "a whole number from 0 to 2147483647") for value in (-1, 1.5, 2**31, math.nan, False, "40", None)),
    *(("min_p", value, "a number from 0 to 1") for value in (-0.1, 1.1, math.nan, True, None)),
    *(("repetition_penalty", value, "a number above 0 to 1000") for value in (0, -1, math.nan, math.inf, 1001, True)),
    *(("presence_penalty", value, "a number from -1000 to 1000") for value in (-1001, 1001, math.nan, -math.inf, False)),
    *(("frequency_penalty", value, "a number from -1000 to 1000") for value in (-1001, 1001, math.nan, math.inf, True)),
    *(("seed", value, "a whole number from 0 to 4294967295") for value in (-1, 2**32, 1.0, math.nan, True, "7")),
    *(("logprobs", value, "a whole number from 0 to 20") for value in (-1, 21, 2.0, True, "5")),
    *(("max_new_tokens", value, "a whole number from 1") for value in (0, -1, 1.0, math.inf, math.nan, True, None)),
]


@pytest.mark.parametrize("name, value, allowed", BAD)
def test_a_value_out_of_range_is_an_error_that_names_it_and_what_is_allowed(name, value, allowed):
    with pytest.raises(UserError, match=re.escape(f"{name} {value} is out of range: give {allowed}") + "$"):
        SamplingOptions(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        *(("temperature", value) for value in (0, 0.0, 1, 1000, 1e-9, np.float32(0.7), np.float64(0.7), np.int32(1))),
        *(("top_p", value) for value in (1, 1.0, 1e-9, np.float32(0.9))),
        *(("top_k", value) for value in (0, 1, 2**31 - 1, np.int64(40), np.uint8(40))),
        *(("min_p", value) for value in (0, 1, 0.05)),
        *(("repetition_penalty", value) for value in (1e-9, 1, 1000)),
        *(("presence_penalty", value) for value in (-1000, 0, 1000)),
        *(("frequency_penalty", value) for value in (-1000, 0, 1000)),
        *(("seed", value) for value in (None, 0, 2**32 - 1, np.uint32(2**32 - 1))),
        *(("logprobs", value) for value in (None, 0, MAX_LOGPROBS)),
        *(("max_new_tokens", value) for value in (1, 2**40)),
        ("logit_bias", {token: -100.0 for token in range(BIAS_SLOTS)}),
        ("stop", ("a", "a\n", "\0")),
    ],
)
def test_the_ends_of_each_range_are_allowed(name, value):
    assert getattr(SamplingOptions(**{name: value}), name) == value


def test_one_stop_string_may_be_given_alone_and_a_list_becomes_a_tuple():
    assert SamplingOptions(stop="end").stop == ("end",)
    assert SamplingOptions(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("stop", ["", ("a", ""), [""]])
def test_an_empty_stop_string_is_an_error(stop):
    with pytest.raises(UserError, match="stop has an empty string"):
        SamplingOptions(stop=stop)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_not_finite_is_an_error_that_names_the_token(value):
    with pytest.raises(UserError, match=f"logit_bias of token 7 is {value}: give a number from -1000 to 1000"):
        SamplingOptions(logit_bias={3: 1.0, 7: value})


def test_more_biases_than_fit_are_an_error():
    with pytest.raises(UserError, match="logit_bias has 301 entries: give at most 300"):
        SamplingOptions(logit_bias={token: 1.0 for token in range(301)})


@pytest.mark.parametrize(
    "bias", [{7: "1"}, {7: None}, {"7": 1.0}, {7.5: 1.0}, {True: 1.0}, {7: 1e39}], ids=["text", "none", "key", "float key", "bool", "f32"]
)
def test_a_bias_that_is_no_number_or_no_token_is_an_error(bias):
    with pytest.raises(UserError, match="logit_bias"):
        SamplingOptions(logit_bias=bias)


@pytest.mark.parametrize("stop", [("a", 3), 3, None], ids=["a number among them", "a number", "none"])
def test_a_stop_that_is_no_text_is_an_error_that_says_so(stop):
    with pytest.raises(UserError, match=r"stop .*text"):
        SamplingOptions(stop=stop)


@pytest.mark.parametrize("value", ["false", None, 2])
def test_ignore_eos_is_yes_or_no(value):
    with pytest.raises(UserError, match="ignore_eos"):
        SamplingOptions(ignore_eos=value)


def test_rows_are_stacked_in_their_order():
    first = SamplingOptions(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=2, presence_penalty=-1, seed=9)
    second = SamplingOptions(frequency_penalty=4, logit_bias={5: -2.0, 1: 3.5}, ignore_eos=True, seed=2**32 - 1)
    params = SamplingParams.stack([first, second], [8, 2])
    expected = {
        "temperature": np.float32([0.5, 0]),
        "top_k": np.int32([3, 0]),
        "top_p": np.float32([0.25, 1]),
        "min_p": np.float32([0.125, 0]),
        "repetition_penalty": np.float32([2, 1]),
        "presence_penalty": np.float32([-1, 0]),
        "frequency_penalty": np.float32([0, 4]),
        "seed": np.uint32([9, 2**32 - 1]),
    }
    for name, value in expected.items():
        assert getattr(params, name).dtype == value.dtype, name
        np.testing.assert_array_equal(getattr(params, name), value, name)
    bias = [
        dict(zip(tokens.tolist(), values.tolist(), strict=True))
        for tokens, values in zip(params.bias_tokens, params.bias_values, strict=True)
    ]
    assert bias == [{-1: 0.0}, {5: -2.0, 1: 3.5, -1: 0.0}]
    assert [set(row.tolist()) for row in params.stop_tokens] == [{2, 8, -1}, {-1}]


def test_the_arrays_of_any_requests_have_the_same_shapes():
    full = SamplingOptions(logit_bias={token: 1.0 for token in range(BIAS_SLOTS)}, stop=("x",), logprobs=3, top_k=5)
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), SamplingParams.stack([option.seeded()], eos))
        for option, eos in ((SamplingOptions(), []), (full, list(range(STOP_TOKEN_SLOTS))))
    ]
    assert shapes[0] == shapes[1]


def test_more_end_of_sequence_ids_than_fit_are_an_error():
    with pytest.raises(UserError, match="the model has 17 end-of-sequence ids: at most 16 are supported"):
        SamplingParams.stack([SamplingOptions(seed=0)], range(STOP_TOKEN_SLOTS + 1))
