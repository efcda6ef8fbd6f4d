"""`append`: write new rows of keys or values into the cache, in place when the cache is donated.

What must not happen: a padded or idle row that overwrites a held slot. `dynamic_update_slice` clamps its start, so a chunk that
ends past the last slot would slide back over held ones; index -1 of a scatter writes the *last* slot. Both are handled here.

Three places for the token at position p: slot p of its row (`append`), slot p mod R of a ring (`append_ring`), or slot p mod C of the page
that the row's table names (`append_pages`).
"""

import jax
import jax.numpy as jnp

from kernels.packing import Packing
from kernels.row_major import row_major


def append(
    buffer: jax.Array,
    new: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    order: str,
    packing: Packing | None = None,
) -> jax.Array:
    """Writes `new[b, t]` to slot `start[b] + t` of row `rows[b]`, for t < count[b]; everything else keeps its bits.

    Args:
      buffer: [L, B, ...]: the stack of one cache array, its last three axes as `order` says.
      new: [B', T, K, H].
      layer: which of the L layers.
      rows: int32 [B'], or None: row b is row b.
      start: int32 [B'], the first slot to write; below 0 (for T > 1 only), the tokens before slot 0 are dropped.
      count: int32 [B'], how many of the T are real. Slots at or past the capacity are dropped.
      order: static; "KSH" for [L, B, K, S, H], and so on.
      packing: static; of slots that share rows: the buffer's last axes are as `Packing.shape` says then, not as `order`.

    Returns:
      The buffer with the rows written.
    """
    B, T = new.shape[:2]
    buffer, new = jnp.asarray(buffer), new.astype(buffer.dtype)
    index = jnp.arange(B) if rows is None else rows
    if packing is not None:
        return _append_packed(buffer, new, layer, index, start, count, packing)
    slot_axis = order.index("S")
    slots = buffer.shape[2 + slot_axis]
    if T == 1:
        slot = jnp.where(count > 0, start, slots)  # idle rows write to a slot that does not exist
        where = tuple(slot if axis == "S" else slice(None) for axis in order)
        heads = new[:, 0] if order.index("K") < order.index("H") else new[:, 0].swapaxes(1, 2)
        return buffer.at[layer, index, *where].set(heads, mode="drop")

    width = min(T, slots)
    if slots < T:  # the tokens that begin at slot 0 or later
        skipped = jnp.clip(-start, 0, T - width)
        new = jax.vmap(lambda part, first: jax.lax.dynamic_slice_in_dim(part, first, width))(new, skipped)
        start, count = start + skipped, count - skipped
    new = new.transpose(0, *(1 + "SKH".index(axis) for axis in order))  # the tokens stand where the slots do

    def write(b, buffer):
        first = jnp.clip(start[b], 0, slots - width)
        corner = [layer, index[b], 0, 0, 0]
        corner[2 + slot_axis] = first
        size = list(buffer.shape)
        size[0], size[1], size[2 + slot_axis] = 1, 1, width
        old = row_major(jax.lax.dynamic_slice(buffer, corner, size))
        token = first + jnp.arange(width) - start[b]  # which new token each slot of this window would hold
        keep = (token >= 0) & (token < count[b])
        # Only a chunk that ends past the last slot is moved; without the branch every element of every chunk pays for it.
        shift = start[b] - first
        moved = jax.lax.cond(shift == 0, lambda part: part, lambda part: jnp.roll(part, shift, axis=slot_axis), new[b])
        mask = jnp.expand_dims(keep, [axis for axis in range(3) if axis != slot_axis])
        return row_major(jax.lax.dynamic_update_slice(buffer, jnp.where(mask, moved[None, None], old), corner))

    return write(0, buffer) if B == 1 else jax.lax.fori_loop(0, B, write, buffer)


def _append_packed(buffer, new, layer, index, start, count, packing):
    T, slots, axis = new.shape[1], _slots(buffer, "", packing), 2 + packing.order.index("S")
    if T == 1:
        slot = jnp.where(count > 0, start, slots)  # idle rows write to a slot that does not exist
        return _put(buffer, new[:, 0], layer, index, slot, packing)

    touched = min(-(-(T - 1) // packing.span) + 1, slots // packing.span)  # along S
    width = touched * packing.span
    around = jnp.pad(new, ((0, 0), (width, width), (0, 0), (0, 0)))  # so that any window of slots is a slice

    def write(b, buffer):
        first = jnp.clip(start[b] // packing.span, 0, slots // packing.span - touched)
        corner = [layer, index[b], 0, 0, 0]
        corner[axis] = first
        old = jax.lax.dynamic_slice(buffer, corner, (1, 1, *packing.shape(width)))
        skipped = first * packing.span - start[b]  # of the new tokens, those before the window
        token = skipped + jnp.arange(width)
        here = jax.lax.dynamic_slice(around[b], (skipped + width, 0, 0), (width, *new.shape[2:]))
        keep = jnp.broadcast_to(((token >= 0) & (token < count[b]))[:, None, None], here.shape)
        merged = row_major(jnp.where(packing.pack(keep)[None, None], packing.pack(here)[None, None], old))
        return row_major(jax.lax.dynamic_update_slice(buffer, merged, corner))

    return write(0, buffer) if new.shape[0] == 1 else jax.lax.fori_loop(0, new.shape[0], write, buffer)


def _put(buffer, new, layer, index, slot, packing):
    """new [B', K, W] in one slot of each `index`; nothing where there is no such one."""
    where = layer, index, *packing.at(slot)
    old = buffer.at[where].get(mode="clip")  # [B', lanes]
    shape = new.shape[0], packing.slots, *new.shape[1:]
    keep = jnp.broadcast_to((jnp.arange(packing.slots) == (slot % packing.slots)[:, None])[..., None, None], shape)
    merged = jnp.where(packing.pack_row(keep), packing.pack_row(jnp.broadcast_to(new[:, None], shape)), old)
    return buffer.at[where].set(merged, mode="drop")


def _slots(buffer, order, packing):
    return buffer.shape[2 + order.index("S")] if packing is None else buffer.shape[2] * buffer.shape[3] * packing.slots


def append_ring(
    buffer: jax.Array,
    new: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    order: str,
    packing: Packing | None = None,
) -> jax.Array:
    """`append` to a ring of R slots: the token at position p goes to slot p mod R. Of more than R tokens, the last R stay.

    Args: as of `append`; `start` is the position of the first token.
    """
    slots, T = _slots(buffer, order, packing), new.shape[1]
    if T == 1:
        return append(buffer, new, layer, rows, start % slots, count, order, packing)
    skipped = jnp.maximum(count - slots, 0)  # tokens that others of this call overwrite
    if slots < T:
        new = jax.vmap(lambda part, first: jax.lax.dynamic_slice_in_dim(part, first, slots))(new, skipped)
    first, count = (start + skipped) % slots, count - skipped
    buffer = append(buffer, new, layer, rows, first, count, order, packing)  # up to the ring's end
    return append(buffer, new, layer, rows, first - slots, count, order, packing)  # and on from its beginning


def append_pages(
    pool: jax.Array,
    new: jax.Array,
    layer: jax.Array | int,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
    order: str,
    packing: Packing | None = None,
) -> jax.Array:
    """`append` to pages of C slots: the token at position p of row b goes to slot p mod C of page `table[b, p // C]`.

    Args:
      pool: [L, P, ...], the last three axes as `order` says, S being the C slots of a page.
      new: [B', T, K, H].
      table: int32 [B', M], pages of the rows that the tokens go to; P or more where a row has none: its tokens are dropped. No page that
        is written to may stand in it twice.
      start, count, packing: as of `append`.
    """
    B, T = new.shape[:2]
    pages, size = pool.shape[1], _slots(pool, order, packing)
    if T == 1:
        page = jnp.take_along_axis(table, jnp.minimum(start // size, table.shape[1] - 1)[:, None], axis=1)[:, 0]
        page = jnp.where(start < table.shape[1] * size, page, pages)  # past the table: a page that does not exist
        return append(pool, new, layer, page, start % size, count, order, packing)

    touched = -(-(T - 1) // size) + 1  # pages that T tokens reach into at most
    number = start[:, None] // size + jnp.arange(touched)  # [B', J], along the table
    page = jnp.take_along_axis(table, jnp.minimum(number, table.shape[1] - 1), axis=1)
    there = (number < table.shape[1]) & (page < pages)
    token = number[:, :, None] * size + jnp.arange(size) - start[:, None, None]  # [B', J, C], which of the T each slot would hold
    keep = (token >= 0) & (token < count[:, None, None]) & there[:, :, None]
    parts = jax.vmap(lambda part, at: part[at])(new.astype(pool.dtype), jnp.clip(token, 0, T - 1))  # [B', J, C, K, H]
    keep = keep[..., None, None]
    if packing is not None:
        old = pool.at[layer, page].get(mode="clip")
        merged = jnp.where(packing.pack(jnp.broadcast_to(keep, parts.shape)), packing.pack(parts), old)
        return pool.at[layer, jnp.where(there, page, pages)].set(merged, mode="drop")
    parts, keep = (x.transpose(0, 1, *(2 + "SKH".index(axis) for axis in order)) for x in (parts, keep))

    def write(index, pool):
        b, j = index // touched, index % touched
        corner = [layer, jnp.minimum(page[b, j], pages - 1), 0, 0, 0]
        old = row_major(jax.lax.dynamic_slice(pool, corner, (1, 1, *pool.shape[2:])))
        return row_major(jax.lax.dynamic_update_slice(pool, jnp.where(keep[b, j], parts[b, j][None, None], old), corner))

    return jax.lax.fori_loop(0, B * touched, write, pool)
