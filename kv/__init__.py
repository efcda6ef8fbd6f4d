"""Floor 3: the KV cache, every kind behind one method: `layer.attend(query, new, step, spec, weights) -> out, new layer`;
`attend_heads` is the same for queries, keys and values that are still in one array.

A kind is what is kept per token (keys and values, or a latent row), where it lies (dense, ring, paged) and in what numbers (f32, bf16,
int8, int4, fp8); any of the three goes with any of the others. The host's side of pages: `Pager`, and what it is made of.
"""

from kv.account import bytes_per_token, held_bytes, nbytes, report, stores
from kv.cache import Cache, default_pages, fresh, init, page_groups, rewind_margin
from kv.export import Export, load_export, save_export
from kv.format import Format
from kv.host_store import Handle, HostStore
from kv.layer import attend_heads
from kv.offload import HostPages, copy_pages, read_pages, write_pages
from kv.pager import Pager, pool_sizes
from kv.pages import OutOfPages, PageAllocator
from kv.prefix import PageGroup, PrefixTree
from kv.split_pager import SplitPager
from kv.transfer import export_row, import_row
from kv.types import AttentionSpec, KeyValue, LatentQuery, LatentRow, LatentSpec, LatentWeights, LayerSpec, Query, Step

__all__ = [
    "AttentionSpec",
    "Cache",
    "Export",
    "Format",
    "Handle",
    "HostPages",
    "HostStore",
    "KeyValue",
    "LatentQuery",
    "LatentRow",
    "LatentSpec",
    "LatentWeights",
    "LayerSpec",
    "OutOfPages",
    "PageAllocator",
    "PageGroup",
    "Pager",
    "PrefixTree",
    "Query",
    "SplitPager",
    "Step",
    "attend_heads",
    "bytes_per_token",
    "copy_pages",
    "default_pages",
    "export_row",
    "fresh",
    "held_bytes",
    "import_row",
    "init",
    "load_export",
    "nbytes",
    "page_groups",
    "pool_sizes",
    "read_pages",
    "report",
    "rewind_margin",
    "save_export",
    "stores",
    "write_pages",
]
