"""The sampler against one that sorts, and the laws of its randomness."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from sampling.options import SamplingOptions, SamplingParams
from sampling.sample import penalize, sample, truncate

WIDE, NARROW = (4, 97), (3, 7)  # [B, V]
DRAWS = 512  # rows of one call that estimates a distribution
ROUNDING = 1e-5  # relative: 97 terms of f32 sum to within 97 * 2^-24 = 6e-6 of their exact sum, whatever the order
penalize_, sample_, truncate_ = jax.jit(penalize), jax.jit(sample), jax.jit(truncate)


def stack(options, seeds=None):
    seeds = [option.seed or 0 for option in options] if seeds is None else seeds
    seeded = [dataclasses.replace(option, seed=int(seed)) for option, seed in zip(options, seeds, strict=True)]
    return SamplingParams.stack(seeded, [])


def nothing(shape):
    return np.zeros(shape, bool), np.zeros(shape, np.int32)


def draw_tokens(logits, options, positions, seeds=None, seen=None, counts=None):
    unseen, uncounted = nothing(logits.shape)
    seen, counts = unseen if seen is None else seen, uncounted if counts is None else counts
    return np.asarray(sample_(np.asarray(logits, np.float32), stack(options, seeds), np.asarray(positions, np.int32), seen, counts))


values = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, -50.0, 1e4, -1e4, 1e30, -1e30]),  # few values: ties
    st.floats(-20, 20, width=32, allow_subnormal=False).filter(lambda value: value != 0),  # -0.0 has a test of its own
)


@st.composite
def batches(draw, shape, offsets=(0.0, -100.0, 1e4)):
    """Logits f32 [B, V]: few rows drawn number by number, or many from a seed with a scale, some of them rounded so that they tie."""
    if shape == NARROW:
        return np.asarray(
            draw(st.lists(st.lists(values, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])), np.float32
        )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = np.asarray(draw(st.lists(st.sampled_from([1e-3, 1.0, 5.0, 1e3]), min_size=shape[0], max_size=shape[0])))[:, None]
    logits = rng.normal(size=shape) * scale + draw(st.sampled_from(offsets))
    return (np.round(logits) + 0.0 if draw(st.booleans()) else logits).astype(np.float32)


filters = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 96, 97, 98, 2**31 - 1]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    seed=st.integers(0, 2**32 - 1),
)
penalties = st.builds(
    SamplingOptions,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 1000.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -3.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.sampled_from([-100.0, 100.0, 0.5]), max_size=7),
)


def several(options, shape):
    return st.lists(options, min_size=shape[0], max_size=shape[0])


@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["narrow", "wide"])
def test_the_filters_keep_what_sorting_keeps(reference, shape):
    """Exactly, except for a token whose mass or ratio is within ROUNDING of the limit: there either is right."""

    @settings(deadline=None, max_examples=150)
    @given(logits=batches(shape), options=several(filters, shape))
    def check(logits, options):
        out = np.asarray(truncate_(logits, stack(options)))
        kept = out > -np.inf
        np.testing.assert_array_equal(out[kept], logits[kept])
        for row, option in enumerate(options):
            assert kept[row][reference.kept(logits[row], option, -ROUNDING)].all(), (row, option)
            assert not kept[row][~reference.kept(logits[row], option, ROUNDING)].any(), (row, option)

    check()


def test_filters_on_a_row_small_enough_to_check_by_hand():
    row = np.log(np.float32([0.4, 0.1, 0.2, 0.2, 0.1]))
    options = [
        SamplingOptions(top_k=2),  # the tie at the second place stays whole
        SamplingOptions(top_p=0.39),
        SamplingOptions(top_p=0.41),
        SamplingOptions(min_p=0.3),  # of the likeliest: 0.12
        SamplingOptions(top_k=3, top_p=0.45),  # top-p counts what top-k left: 0.4 of 0.8 is enough
        SamplingOptions(top_k=3, top_p=0.55, min_p=0.6),
    ]
    kept = np.asarray(truncate_(np.stack([row] * len(options)), stack(options))) > -np.inf
    assert [np.flatnonzero(row).tolist() for row in kept] == [[0, 2, 3], [0], [0, 2, 3], [0, 2, 3], [0], [0]]


def test_minus_zero_is_as_likely_as_zero():
    logits = np.float32([[0.0, -0.0, -1.0, -2.0, -2.0, -2.0, -2.0]] * 3)
    kept = np.asarray(truncate_(logits, stack([SamplingOptions(top_k=1)] * 3))) > -np.inf
    assert kept.tolist() == [[True, True, False, False, False, False, False]] * 3


@pytest.mark.parametrize("top_p", [1e-9, 1e-30, 1e-40, 1e-50])
def test_however_small_top_p_is_the_likeliest_token_stays(top_p):
    logits = np.float32([[-1.0, 0.0, 5.0, 1.0, 0.0, 0.0, 0.0]] * 3)
    assert draw_tokens(logits, [SamplingOptions(temperature=1.0, top_p=top_p, seed=1)] * 3, [1, 2, 3]).tolist() == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 2e-38, 1e-42])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = np.float32([[13.0, 14.0, 15.0, 1.0, -7.0, 0.0, 0.0]] * 3)
    assert draw_tokens(logits, [SamplingOptions(temperature=temperature, seed=1)] * 3, [1, 2, 3]).tolist() == [2, 2, 2]


@settings(deadline=None, max_examples=150)
@given(logits=batches(NARROW), options=several(penalties, NARROW), data=st.data())
def test_penalties_and_biases_are_as_defined(reference, logits, options, data):
    held = st.lists(st.integers(0, 6), max_size=7)
    seen, counts = nothing(NARROW)
    for row in range(NARROW[0]):
        seen[row, data.draw(held, "prompt")] = True
        np.add.at(counts[row], data.draw(held, "answer"), 1)
    out = np.asarray(penalize_(logits, stack(options), seen, counts))
    for row, option in enumerate(options):
        expected = reference.penalize(logits[row], option, seen[row], counts[row])
        # Four f32 operations, each within half a unit in the last place of the largest value on the way.
        largest = np.abs(logits[row].astype(np.float64)) * max(1.0, option.repetition_penalty, 1 / option.repetition_penalty) + 130
        assert (np.abs(out[row] - expected) <= 4 * 2.0**-23 * largest).all()


def test_repetition_counts_prompt_and_answer_but_presence_and_frequency_the_answer_alone():
    logits = np.float32([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]] * 3)
    seen, counts = nothing(NARROW)
    seen[:, [1, 4]] = True  # the prompt
    counts[:, 2], counts[:, 5] = 3, 1  # the answer
    options = [SamplingOptions(repetition_penalty=2), SamplingOptions(presence_penalty=0.5), SamplingOptions(frequency_penalty=0.5)]
    out = np.asarray(penalize_(logits, stack(options), seen, counts))
    assert out.tolist() == [
        [2.0, 1.0, 1.0, -2.0, -4.0, -4.0, 0.0],
        [2.0, 2.0, 1.5, -2.0, -2.0, -2.5, 0.0],
        [2.0, 2.0, 0.5, -2.0, -2.0, -2.5, 0.0],
    ]


@pytest.mark.parametrize("token", [0, 11, 96])
def test_a_bias_of_100_forces_a_token(rng, token):
    logits = rng.normal(size=WIDE) * 3
    forced = [SamplingOptions(logit_bias={token: 100}, temperature=temperature, seed=4) for temperature in (0, 0.5, 1, 2)]
    assert draw_tokens(logits, forced, [0, 1, 2, 3]).tolist() == [token] * 4


def test_a_bias_of_minus_100_bans_a_token(rng):
    logits = rng.normal(size=WIDE) * 3
    best = logits.argmax(-1)
    banned = [SamplingOptions(logit_bias={int(token): -100}) for token in best]
    second = np.argsort(logits, axis=-1)[:, -2]
    assert draw_tokens(logits, banned, [0, 1, 2, 3]).tolist() == second.tolist()


@settings(deadline=None, max_examples=150)
@given(
    logits=batches(WIDE, offsets=[0.0]),
    options=several(filters, WIDE),
    positions=st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
)
def test_a_token_is_the_argmax_of_the_kept_scores_and_the_rows_own_noise(reference, logits, options, positions):
    # No offset: far from 0, scores that differ by one rounding would tie or not as XLA's division happens to round.
    seen, counts = nothing(WIDE)
    tokens = draw_tokens(logits, options, positions)
    for row, option in enumerate(options):
        expected, margin = reference.token(logits[row], option, positions[row], seen[row], counts[row])
        if option.temperature == 0:
            assert tokens[row] == logits[row].argmax()
        elif margin > 1e-5:  # the division by the temperature and the sum with the noise round
            assert tokens[row] == expected


def test_what_no_row_asks_for_is_not_done():
    """Filters, noise and penalties stand in branches, which a batch without such a row does not enter."""
    arguments = np.zeros(WIDE, np.float32), stack([SamplingOptions()] * 4), np.zeros(4, np.int32), *nothing(WIDE)
    always, all_ = operations(jax.make_jaxpr(sample)(*arguments).jaxpr)
    costly = {"while", "exp", "log", "random_bits"}
    assert costly <= all_
    assert not costly & always
    always, all_ = operations(jax.make_jaxpr(truncate)(*arguments[:2]).jaxpr)
    assert "while" in all_
    assert not costly & always
    assert not {"sort", "top_k"} & all_


def operations(jaxpr):
    """Names of the primitives outside of branches on traced values, and of all."""
    always, all_ = set(), set()
    for equation in jaxpr.eqns:
        inner = [operations(sub) for sub in jaxprs_in_params(equation.params)]
        all_ |= {equation.primitive.name}.union(*(every for _, every in inner))
        always |= {equation.primitive.name}
        if equation.primitive.name != "cond":
            always = always.union(*(outside for outside, _ in inner))
    return always, all_


def test_greedy_rows_ask_for_no_filter(rng, monkeypatch):
    """A row at temperature 0 costs the others no pass, whatever its filters say."""
    given = []
    monkeypatch.setattr(sys.modules[sample.__module__], "truncate", lambda logits, params: given.append(params) or logits)
    options = [SamplingOptions(top_k=3, top_p=0.5, min_p=0.1), SamplingOptions(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)]
    with jax.disable_jit():
        sample(rng.normal(size=(2, 7)).astype(np.float32), stack(options), np.zeros(2, np.int32), *nothing((2, 7)))
    (params,) = given
    assert [np.asarray(each).tolist() for each in (params.top_k, params.top_p)] == [[0, 3], [1.0, 0.5]]
    assert np.asarray(params.min_p).tolist() == [0.0, np.float32(0.1)]


def test_top_k_1_is_greedy(rng):
    logits = rng.normal(size=WIDE)
    for position in range(20):
        tokens = draw_tokens(logits, [SamplingOptions(temperature=2, top_k=1, seed=position)] * 4, [position] * 4)
        assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "option",
    [
        *(SamplingOptions(temperature=temperature) for temperature in (0.5, 1.0, 2.0)),
        SamplingOptions(temperature=1.5, top_k=4),
        SamplingOptions(temperature=1.5, top_p=0.8),
        SamplingOptions(temperature=1.5, min_p=0.2),
        SamplingOptions(temperature=1.0, logit_bias={0: 1.0, 3: -1.0}),
    ],
    ids=lambda option: f"T{option.temperature}-k{option.top_k}-p{option.top_p}-m{option.min_p}-{len(option.logit_bias)}",
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_tokens_are_drawn_with_the_softmax_probabilities(reference, option, over):
    logits = np.float32([1.0, 0.5, 0.0, -0.5, 2.0, -3.0, 0.25])
    calls = 16
    numbers = np.arange(calls * DRAWS).reshape(calls, DRAWS)
    drawn = np.concatenate(
        [
            draw_tokens(
                np.tile(logits, (DRAWS, 1)), [option] * DRAWS, *((part, [5] * DRAWS) if over == "positions" else ([5] * DRAWS, part))
            )
            for part in numbers
        ]
    )
    scores = reference.penalize(logits, option, *np.zeros((2, 7))) / option.temperature
    weights = np.where(reference.kept(scores, option), np.exp(scores), 0)
    expected = weights / weights.sum() * drawn.size
    observed = np.bincount(drawn, minlength=7)
    assert not observed[expected == 0].any()
    possible = expected > 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    # Seeds and positions are fixed, so this can't fail by chance: 27.9 is exceeded with probability 1e-4 at 6 degrees of freedom.
    assert chi_square < 27.9, dict(zip(expected.round(1), observed, strict=True))


@pytest.mark.parametrize("step", [{"position": 1}, {"seed": 1}, {"seed": 1, "position": -1}], ids=str)
def test_neighbouring_positions_and_seeds_draw_independently(step):
    options, logits = [SamplingOptions(temperature=1.0)] * DRAWS, np.zeros((DRAWS, 7), np.float32)
    joint = np.zeros((7, 7))
    for first in range(0, 16 * DRAWS, DRAWS):
        positions, seeds = first + np.arange(DRAWS) + 1, (first + np.arange(DRAWS)) // 7
        before = draw_tokens(logits, options, positions, seeds)
        after = draw_tokens(logits, options, positions + step.get("position", 0), seeds + step.get("seed", 0))
        np.add.at(joint, (before, after), 1)
    expected = joint.sum() / 49
    chi_square = ((joint - expected) ** 2 / expected).sum()
    assert chi_square < 93.2, joint  # exceeded with probability 1e-4 at 48 degrees of freedom


MIXED = [
    SamplingOptions(temperature=0.8, top_p=0.9, seed=3),
    SamplingOptions(),
    SamplingOptions(temperature=1.5, top_k=20, min_p=0.05, repetition_penalty=1.2, seed=3),
    SamplingOptions(temperature=1.0, presence_penalty=0.5, logit_bias={4: 2.0, 96: -1.0}, seed=11),
]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def mixed(rng):
    """Arguments of `draw_tokens` for twenty steps of a batch with four kinds of rows."""
    return [
        {
            "logits": rng.normal(size=WIDE).astype(np.float32) * 3,
            "positions": rng.integers(0, 5000, 4),
            "seen": rng.random(WIDE) < 0.2,
            "counts": rng.integers(0, 3, WIDE).astype(np.int32),
        }
        for _ in range(20)
    ]


def test_a_rows_token_does_not_depend_on_its_slot(mixed):
    for step in mixed:
        tokens = draw_tokens(options=MIXED, **step)
        for order in ([3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]):
            moved = draw_tokens(options=[MIXED[row] for row in order], **{name: value[order] for name, value in step.items()})
            assert moved.tolist() == tokens[order].tolist()


def test_a_rows_token_does_not_depend_on_the_other_rows(mixed):
    for step in mixed:
        tokens = draw_tokens(options=MIXED, **step)
        for row, option in enumerate(MIXED):
            others = [SamplingOptions()] * 4
            others[row] = option
            changed = {name: np.zeros_like(value) for name, value in step.items()}
            for name, value in step.items():
                changed[name][row] = value[row]
            assert draw_tokens(options=others, **changed)[row] == tokens[row]


def test_a_rows_token_does_not_depend_on_the_batch_size(mixed):
    for step in mixed:
        tokens = draw_tokens(options=MIXED, **step)
        alone = [draw_tokens(options=[MIXED[row]], **{name: value[row : row + 1] for name, value in step.items()})[0] for row in range(4)]
        assert alone == tokens.tolist()


def test_the_same_seed_and_position_give_the_same_token_and_others_give_others():
    logits, options = np.zeros(WIDE, np.float32), [SamplingOptions(temperature=1.0)] * 4
    first = draw_tokens(logits, options, [0, 1, 2, 3], [5, 5, 5, 5])
    assert draw_tokens(logits, options, [3, 2, 1, 0], [5, 5, 5, 5]).tolist() == first[::-1].tolist()
    assert len({*first.tolist(), *draw_tokens(logits, options, [0, 1, 2, 3], [6, 6, 6, 6]).tolist()}) > 4
