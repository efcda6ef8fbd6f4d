"""The sampler against one that sorts, and the laws of its randomness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.options import SamplingOptions, SamplingParams
from sampling.sample import penalize, sample, truncate

WIDE, NARROW = (4, 97), (3, 7)  # [B, V]: all that is compiled here, beside two other batch sizes and the draws
penalize_, sample_, truncate_ = jax.jit(penalize), jax.jit(sample), jax.jit(truncate)


def stack(options, seeds=None):
    return SamplingParams.stack(options, [option.seed or 0 for option in options] if seeds is None else seeds, [])


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
def batches(draw, shape):
    """Logits f32 [B, V]: few rows drawn number by number, or many from a seed with a scale, some of them rounded so that they tie."""
    if shape == NARROW:
        return np.asarray(
            draw(st.lists(st.lists(values, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])), np.float32
        )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = np.asarray(draw(st.lists(st.sampled_from([1e-3, 1.0, 5.0, 1e3]), min_size=shape[0], max_size=shape[0])))[:, None]
    logits = rng.normal(size=shape) * scale + draw(st.sampled_from([0.0, -100.0, 1e4]))
    return (np.round(logits) + 0.0 if draw(st.booleans()) else logits).astype(np.float32)


filters = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 96, 97, 98, 2**31 - 1]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
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
    @settings(deadline=None, max_examples=150)
    @given(logits=batches(shape), options=several(filters, shape))
    def check(logits, options):
        out = np.asarray(truncate_(logits, stack(options)))
        kept = out > -np.inf
        np.testing.assert_array_equal(out[kept], logits[kept])
        for row, option in enumerate(options):
            # Sums and ratios in f32 are within 1e-5 of the exact ones: what two references that far apart agree on is certain.
            sure, possible = reference.kept(logits[row], option, -1e-5), reference.kept(logits[row], option, 1e-5)
            if option.top_p < 1:
                sure, possible = sure & possible, sure | possible
            assert kept[row][sure].all() and not kept[row][~possible].any()

    check()
