"""transformers as the reference, in f32 with plain attention (extra `reference`)."""

from pathlib import Path
from typing import Any

import numpy as np

from runtime import UserError


def load_reference(folder: Path) -> Any:
    """The folder's model, as a torch module.

    Raises:
      UserError: transformers is not installed, or refuses the folder.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(f"the reference needs {error.name}: pip install 'diptych[reference]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # it is another project's program, and the folder may be anything
        raise UserError(f"transformers can't load {folder}: {type(error).__name__}: {error}; check the folder's config.json") from error
    return model.eval()


def answers(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the model makes of one row of tokens [T]: logits f32 [T, V], and the stream after each layer, f32 [L, T, D]."""
    import torch

    states: list[np.ndarray] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        states.append((out[0] if isinstance(out, tuple) else out)[0].float().numpy().copy())

    hooks = [layer.register_forward_hook(keep) for layer in _layers(model)]
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False).logits[0].float().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return logits, np.stack(states)


def greedy(model: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """The tokens with `count` more that the model finds likeliest, one after the other."""
    for _ in range(count):
        tokens = np.append(tokens, answers(model, tokens)[0][-1].argmax())
    return tokens


def _layers(model: Any) -> Any:
    inner = model.model
    return (inner.language_model if hasattr(inner, "language_model") else inner).layers
