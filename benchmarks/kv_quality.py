"""What a number format of the cache changes about a model's predictions of the evaluation text."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import kv
import sampling
from runtime import UserError
from runtime.corpus import corpus
from sampling import LanguageModel


def quality(
    lm: LanguageModel,
    formats: Mapping[str, kv.Format],
    *,
    tokens: int,
    window: int,
    chunk: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Every format's predictions of the first `tokens` tokens of the evaluation text, beside those of the first format.

    Args:
      lm: the model.
      formats: by name.
      tokens, window, chunk: see `sampling.evaluate`.
      say: told how far it is, once a window.

    Returns:
      By format: perplexity, its ratio to the first format's with the standard error, mean KL divergence, agreement.

    Raises:
      UserError: the text has fewer tokens.
    """
    ids = lm.tokenizer.encode(corpus("evaluation"), add_bos=False, add_eos=False)
    unpredicted = 0 if lm.tokenizer.adds_bos else 1  # without BOS nothing stands before the first token
    if tokens > len(ids) - unpredicted:
        raise UserError(f"--tokens={tokens} is more than the evaluation text has for this model: give at most {len(ids) - unpredicted}")
    began = time.perf_counter()

    def progress(done: int) -> None:
        if done and (done % window == 0 or done == tokens):
            say(f"quality: {done} of {tokens} tokens, {time.perf_counter() - began:.0f} s")

    candidates = {name: (lm, format) for name, format in formats.items()}
    # The windows share nothing, as in every run so far.
    scores = sampling.evaluate(candidates, ids[: tokens + unpredicted], window=window, stride=window, chunk=chunk, progress=progress)
    reference = next(iter(scores.values()))
    parts = {}
    for name, score in scores.items():
        ratio, error = score.ratio(reference)
        parts[name] = {"perplexity": score.perplexity, "ratio": ratio, "ratio_error": error}
        parts[name] |= {"mean_kl": score.mean_kl, "agreement": score.agreement}
    return parts
