"""Floor 2: the KV cache, every kind behind one method: `layer.attend(query, new, step, spec) -> out, new layer`."""

from kv.cache import Cache, bytes_per_token, fresh, init, nbytes
from kv.pages import OutOfPages, PageAllocator
from kv.prefix import PageGroup, PrefixTree
from kv.types import AttentionSpec, Format, KeyValue, LayerSpec, Query, Step

__all__ = [
    "AttentionSpec",
    "Cache",
    "Format",
    "KeyValue",
    "LayerSpec",
    "OutOfPages",
    "PageAllocator",
    "PageGroup",
    "PrefixTree",
    "Query",
    "Step",
    "bytes_per_token",
    "fresh",
    "init",
    "nbytes",
]
