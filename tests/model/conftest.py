"""For the laws."""

import pytest

import kv.layout


@pytest.fixture(scope="module")
def short_blocks():
    """Attention reads 16 slots at a time, so that 24 tokens take two blocks, and the last of 40 slots' three begins early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.layout, "BLOCK", 16)
        yield
