"""Fixtures for every room."""

import pathlib

import pytest

import checkpoint


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The default model's file: downloaded once, then found in the cache."""
    return checkpoint.resolve("smollm2-135m-instruct")
