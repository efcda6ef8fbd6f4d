"""What transformers makes of a folder, in f32 with plain attention. Needs torch and transformers (extra `reference`)."""

import re
from pathlib import Path

import numpy as np
import torch
import transformers

from parity import reference
from tests.parity.families import Ablation
from tests.parity.fixture import changed

STATES = 8  # tokens of row 0 whose hidden states are kept


def load(folder: Path, ablation: Ablation | None = None) -> torch.nn.Module:
    """The model in a folder, without the feature that `ablation` takes away.

    Raises:
      ValueError: the folder's tensors are not exactly those of the model.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    if ablation is not None:
        config = type(config).from_dict(changed(config.to_dict(), ablation.config))
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if wrong := {kind: names for kind, names in loading.items() if names}:
        raise ValueError(f"{folder}: transformers finds {wrong}")
    if ablation is not None:
        _ablate(model, ablation)
    return model.eval()


def _ablate(model: torch.nn.Module, ablation: Ablation) -> None:
    found = not (ablation.weights or ablation.modules or ablation.without)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            for pattern, constant in ablation.weights.items():
                if re.search(pattern, name):
                    value.fill_(constant)
                    found = True
    for name, module in model.named_modules():
        if ablation.without and re.search(ablation.without, name):
            module.forward = lambda x: x
            found = True
        for pattern, attributes in ablation.modules.items():
            if re.search(pattern, name):
                module.__dict__.update(attributes)
                found = True
    if not found:
        raise ValueError(f"ablation {ablation.name!r} finds nothing to change")


def answers(model: torch.nn.Module, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] of each row alone, 0 past its length, and what each layer makes of row 0's first tokens [L, 8, D]."""
    logits = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
    states = [np.empty(0)] * len(lengths)
    for row, length in enumerate(lengths):
        logits[row, :length], states[row] = reference.answers(model, tokens[row, :length])
    return logits, states[0][:, :STATES]
