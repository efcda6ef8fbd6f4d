"""A model of Llama's family whose matrices are wide enough for groups of 32."""

from typing import Any

from checkpoint import tensors
from model import ModelConfig
from tests.parity import fixture as fixtures

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def config() -> dict[str, Any]:
    """Its `config.json`."""
    return fixtures.read("llama3").config | WIDTHS


def shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of its folder."""
    return sorted({part for weight in tensors.weights(config, tensors.Names(), _Nameless()) for part in weight.parts})


class _Nameless:
    """A source that no fused tensors are named in."""

    def names(self) -> set[str]:
        return set()
