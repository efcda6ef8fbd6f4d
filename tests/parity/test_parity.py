"""Every family against what transformers answers for the same folder, in f32 at matmul precision "highest".

The fixtures hold the recorded answers (`make_fixtures` makes them, and checks that they notice a missing feature). Where torch and a recent
transformers are installed (extra `reference`), the answers are asked for again.
"""

import dataclasses
import functools
import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint
import kv
from model import ModelConfig, Transformer, decode_step, prefill
from tests.parity import fixture as fixtures
from tests.parity.families import FAMILIES

TOLERANCE = 2e-4  # of the largest logit
STEADY = 5e-5  # of the largest logit: what another release of torch or of transformers may change
OLDEST = (5, 11)  # release of transformers that knows all families
CAPACITY, CHUNK = 32, 6


def live() -> bool:
    """Whether the reference can be asked."""
    try:
        importlib.metadata.version("torch")
        release = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in release.split(".")[:2]) >= OLDEST


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Subject:
    """A family's fixture, its folder, and what this stack makes of it."""

    fixture: fixtures.Fixture
    folder: Path
    config: ModelConfig
    params: Any

    @functools.cached_property
    def full(self) -> np.ndarray:
        """Logits of the full forward of all rows at once, f32 [B, T, V]."""
        f = self.fixture
        return np.asarray(prefill(self.model, self.params, self.fresh, f.tokens, jnp.asarray(f.lengths), logits="all")[0])

    @property
    def model(self) -> Transformer:
        return Transformer(self.config)

    @property
    def fresh(self) -> kv.Cache:
        return kv.fresh(self.config, len(self.fixture.lengths))

    @property
    def differing_layers(self) -> str:
        """Which layers' hidden states differ from the reference, if the model shows them."""
        f = self.fixture
        step = kv.Step(rows=None, start=jnp.zeros(len(f.lengths), jnp.int32), count=jnp.asarray(f.lengths))
        _, shown = self.model.apply({"params": self.params}, f.tokens, step, self.fresh, "all", mutable=["intermediates"])
        states = shown.get("intermediates", {})
        if not states:
            return "the model shows no hidden states"
        lines = []
        for number, want in enumerate(f.states):
            got = np.asarray(states[f"stream_{number}"][0])[0, : len(want)]
            lines.append(f"layer {number}: {np.abs(got - want).max() / np.abs(want).max():.1e}")
        return "hidden states of row 0 are off by, relative to their largest: " + ", ".join(lines)


NAMES = [family.name for family in FAMILIES]
# Between them, every kind of cache and every router; the others differ from these in what a full forward shows.
CHUNKED = ("llama3", "gemma3", "phi3_long", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32")


@pytest.fixture(scope="module", params=NAMES)
def subject(request, tmp_path_factory) -> Subject:
    fixture = fixtures.read(request.param)
    folder = fixtures.write_folder(fixture, tmp_path_factory.mktemp("parity") / fixture.name)
    loaded = checkpoint.load(folder, jnp.float32)
    return Subject(fixture, folder, loaded.config, loaded.params)


def off(got: np.ndarray, want: np.ndarray, lengths: np.ndarray) -> list[float]:
    """By how much each row's logits differ, relative to the largest logit."""
    scale = np.abs(want).max()
    return [float(np.abs(got[row, :length] - want[row, :length]).max() / scale) for row, length in enumerate(lengths)]


def test_the_full_forward_equals_transformers(subject):
    f = subject.fixture
    difference = off(subject.full, f.logits, f.lengths)
    if not max(difference) <= TOLERANCE:
        pytest.fail(f"{f.name}: rows of lengths {f.lengths} are off by {difference}; {subject.differing_layers}")


@pytest.mark.parametrize(
    "subject", [name if name in CHUNKED else pytest.param(name, marks=pytest.mark.slow) for name in NAMES], indirect=True, scope="module"
)
def test_chunks_and_decoding_of_a_ragged_batch_equal_transformers(subject):
    f = subject.fixture
    got = np.zeros_like(f.logits)
    cache = kv.init(subject.config, len(f.lengths), CAPACITY, kv.Format())
    for counts in ([6, 5, 5], [6, 3, 0]):
        part, held = np.zeros((len(counts), CHUNK), np.int32), np.asarray(cache.lengths)
        for row, count in enumerate(counts):
            part[row, :count] = f.tokens[row, held[row] : held[row] + count]
        logits, cache = prefill(subject.model, subject.params, cache, part, jnp.asarray(counts), logits="all")
        for row, count in enumerate(counts):
            got[row, held[row] : held[row] + count] = logits[row, :count]
    while (active := (held := np.asarray(cache.lengths)) < f.lengths).any():
        tokens = np.where(active, f.tokens[np.arange(len(held)), np.minimum(held, f.lengths - 1)], -1)
        logits, cache = decode_step(subject.model, subject.params, cache, jnp.asarray(tokens))
        got[active, held[active]] = np.asarray(logits)[active]
    difference = off(got, f.logits, f.lengths)
    assert max(difference) <= TOLERANCE, f"{f.name}: rows of lengths {f.lengths} are off by {difference}"


def test_both_spellings_of_the_config_mean_the_same(subject, tmp_path):
    old = checkpoint.load(fixtures.write_folder(subject.fixture, tmp_path / "hub", hub=True), jnp.float32)
    assert old.config == subject.config
    jax.tree.map(np.testing.assert_array_equal, old.params, subject.params)


@pytest.mark.skipif(not live(), reason="needs torch and transformers>=5.11 (extra `reference`)")
def test_transformers_still_answers_what_is_recorded(subject):
    from tests.parity import reference

    f = subject.fixture
    logits, states = reference.answers(reference.load(subject.folder), f.tokens, f.lengths)
    drift = off(logits, f.logits, f.lengths)
    assert max(drift) <= STEADY, "transformers answers otherwise than recorded"
    np.testing.assert_allclose(states, f.states, rtol=0, atol=STEADY * np.abs(f.states).max())
    difference = off(subject.full, logits, f.lengths)
    assert max(difference) <= TOLERANCE


def test_every_family_has_its_fixture_and_none_is_left_over():
    assert {folder.name for folder in fixtures.FIXTURES.iterdir()} == {family.name for family in FAMILIES}
