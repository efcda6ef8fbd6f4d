"""A tiny random model with a vocabulary of 97 tokens, and a sampler that sorts, in NumPy."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope, Transformer, abstract_params, prefill
from sampling import LanguageModel, SamplingOptions
from tokenizer import tokenizer_from_gguf
from tokenizer.pieces import byte_alphabet

ROUNDING = 1e-5  # relative: 97 terms of f32 sum to within 97 * 2^-24 = 6e-6 of their exact sum, whatever the order
MARGIN = 2e-4  # of the scores' scale: house.md's "twice 1e-4"; nearer candidates may change places between executables


def random_params(config: ModelConfig, seed: int) -> dict:
    """Normal weights and norms of 1, from NumPy: no compiles."""
    rng = np.random.default_rng(seed)

    def draw(box):
        shape = box.value.shape
        return jnp.asarray(np.ones(shape) if len(shape) == 1 else 0.3 * rng.normal(size=shape), jnp.float32)

    return jax.tree.map(draw, abstract_params(config), is_leaf=lambda leaf: hasattr(leaf, "names"))


def tiny_tokenizer_metadata() -> dict:
    """97 tokens: ASCII letters, digits, some marks, the bytes of a few longer characters, five merges, three special tokens."""
    alphabet = byte_alphabet()
    one_byte = [alphabet[ord(char)] for char in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,!?\n:;-'<|>_/"]
    longer = [alphabet[byte] for byte in dict.fromkeys("日本é🙂".encode())]
    tokens = [*one_byte, *longer, "he", "hel", "th", "the", "in", "<s>", "</s>", "<|im_end|>"]
    tokens += [alphabet[0xB0 + number] for number in range(97 - len(tokens))]
    special = {"<s>", "</s>", "<|im_end|>"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": ["h e", "he l", "t h", "th e", "i n"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}assistant:",
    }


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    layer = LayerConfig(AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=10_000.0, dim=8)), MLPConfig(hidden=64))
    config = ModelConfig(vocab_size=97, width=32, layers=(layer,) * 2, norm_eps=1e-5, tie_embeddings=False, context_length=2048)
    return LanguageModel(
        name="tiny",
        model=Transformer(config),
        params=random_params(config, seed=0),
        tokenizer=tokenizer_from_gguf(tiny_tokenizer_metadata()),
        kv_format=kv.Format(),
    )


@pytest.fixture(scope="session")
def ascii_option(lm) -> SamplingOptions:
    """Answers in ASCII, which the tiny vocabulary can read back."""
    banned = {token: -100.0 for token, piece in enumerate(lm.tokenizer.pieces) if max(piece) > 127 or token in lm.tokenizer.special_ids}
    return SamplingOptions(max_new_tokens=6, temperature=1.0, seed=4, logit_bias=banned)


@pytest.fixture(scope="session")
def with_eos():
    """with_eos(lm, *ids): the same model, whose answers end at other tokens."""
    return lambda lm, *ids: dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, eos_ids=frozenset(ids)))


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the sampler should do to one row, written the plain way: sorted, in f64, one step after the other."""

    def penalize(self, logits: np.ndarray, option: SamplingOptions, seen: np.ndarray, counts: np.ndarray) -> np.ndarray:
        out = np.asarray(logits, np.float64).copy()
        for token in range(len(out)):
            if seen[token] or counts[token] > 0:
                out[token] = out[token] / option.repetition_penalty if out[token] > 0 else out[token] * option.repetition_penalty
            if counts[token] > 0:
                out[token] -= option.presence_penalty + option.frequency_penalty * counts[token]
        for token, value in option.logit_bias.items():
            out[token] += value
        return out

    def kept(self, logits: np.ndarray, option: SamplingOptions, slack: float = 0.0) -> np.ndarray:
        """Which tokens pass the filters: bool [V]. A `slack` above 0 also keeps what f32 sums may keep, one below 0 cuts what they may."""
        logits = np.asarray(logits, np.float64)
        kept = np.ones(len(logits), bool)
        if option.top_k:
            kept &= logits >= np.sort(logits)[::-1][min(option.top_k, len(logits)) - 1]
        likelihood = np.where(kept, np.exp(logits - logits.max()), 0.0)
        if np.float32(option.top_p) < 1:
            descending = np.sort(logits[kept])[::-1]
            enough = np.cumsum(np.exp(descending - logits.max())) / likelihood.sum() * (1 - slack) >= np.float32(option.top_p)
            kept &= logits >= descending[np.argmax(enough) if enough.any() else -1]  # tokens as likely as the last one stay with it
        if option.min_p:
            kept &= likelihood * (1 + slack) >= np.float32(option.min_p)
        return kept

    def token(self, logits: np.ndarray, option: SamplingOptions, position: int, seen: np.ndarray, counts: np.ndarray) -> tuple[int, float]:
        """The token, and how far the next candidate is behind, in units of the scores' scale: below MARGIN, rounding decides."""
        scores = self.penalize(logits, option, seen, counts)
        if option.temperature > 0:
            scores = scores / option.temperature
            noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(option.seed), position), (len(scores),))
            noisy = scores + np.asarray(noise, np.float64)
            slack = ROUNDING + 2.0**-22 * np.abs(scores).max()  # a score that is off by so much changes its probability by as much
            sure = np.array_equal(self.kept(scores, option, -slack), self.kept(scores, option, slack))
            scores = np.where(self.kept(scores, option), noisy, -np.inf)
        else:
            sure = True
        second, first = np.sort(scores)[-2:]
        scale = max(1.0, np.abs(scores[np.isfinite(scores)]).max())
        return int(np.argmax(scores)), min(first - second, scale) / scale if sure else 0.0


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def full_forward(lm):
    """full_forward(sequences): the model over each whole sequence (at most four of at most 64 tokens), no cache: f32 [V] per token."""

    def run(sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        tokens = np.zeros((4, 64), np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
        counts = np.asarray([len(sequence) for sequence in sequences] + [0] * (4 - len(sequences)), np.int32)
        logits, _ = prefill(lm.model, lm.params, kv.fresh(lm.config, 4), tokens, counts, logits="all")
        return [np.asarray(logits[row, : len(sequence)]) for row, sequence in enumerate(sequences)]

    return run


@pytest.fixture(scope="session")
def expect_tokens(lm, reference, full_forward):
    """expect_tokens({name: (prompt, option, tokens)}): each answer is what the full forward and the sorting sampler give."""

    def check(answers: Mapping[str, tuple[Sequence[int], SamplingOptions, Sequence[int]]]) -> None:
        logits = full_forward([[*prompt, *tokens[:-1]] for prompt, _, tokens in answers.values()])
        for (name, (prompt, option, tokens)), rows in zip(answers.items(), logits, strict=True):
            assert len(tokens) > 0, name
            seen = np.isin(np.arange(lm.config.vocab_size), prompt)
            counts = np.zeros(lm.config.vocab_size, int)
            for number, token in enumerate(tokens):
                position = len(prompt) + number
                expected, margin = reference.token(rows[position - 1], option, position, seen, counts)
                if token != expected:
                    assert margin < MARGIN, f"{name}: token {number} is {token}, not {expected} (margin {margin:.2g})"
                    print(f"{name}: token {number} is {token}, not {expected}: a tie within rounding ({margin:.2g})")
                counts[token] += 1

    return check
