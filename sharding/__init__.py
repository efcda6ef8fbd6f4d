"""Floor 0: logical axis names (`sharding.axes`)."""

from sharding import axes

__all__ = ["axes"]
