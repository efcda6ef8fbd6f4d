"""Logical axis names: every weight and cache array says what its axes are; a rule table maps them to mesh axes.

The single letters are the house alphabet that comments and einsums use.
"""

BATCH = "batch"  # B: rows of the batch
SAMPLED = "sampled"  # B: rows whose next token is chosen, a piece of work of its own
TOKENS = "tokens"  # T: the new tokens of a row
SLOTS = "slots"  # S: cache slots of a row
PAGES = "pages"  # P: pages of a pool
PAGE_SLOTS = "page_slots"  # C: tokens of a page
LAYERS = "layers"  # L: a stack over layers; never sharded
VOCAB = "vocab"  # V
EMBED = "embed"  # D: the model's width
KV_HEADS = "kv_heads"  # K
Q_PER_KV = "q_per_kv"  # G: query heads that share one KV head
QKV = "qkv"  # G + 2: the query heads of one KV head, then its key, then its value
HEADS = "heads"  # N: query heads, those of a KV head side by side
HEAD_DIM = "head_dim"  # H
GATE_UP = "gate_up"  # 2: gate, up
MLP = "mlp"  # F
NORM = "norm"  # a vector over the width: a norm's scale, an expert's bias
EXPERTS = "experts"  # E: experts of a mixture
ROUTED = "routed"  # E: what a router says of each expert
LATENT = "latent"  # C: a low-rank projection between the width and the heads
INDEX = "index"  # Hi: an indexer's heads
ONE = "one"  # a single row

AXES = frozenset(value for name, value in globals().items() if name.isupper())
