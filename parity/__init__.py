"""Floor 6: this stack beside another on the same weights and tokens: where they part, and the likely cause."""

from parity.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
