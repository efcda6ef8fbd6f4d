"""`append`: write new rows of keys or values into the cache, in place when the cache is donated.

What must not happen: a padded or idle row that overwrites a held slot. `dynamic_update_slice` clamps its start, so a chunk that
ends past the last slot would slide back over held ones; index -1 of a scatter writes the *last* slot. Both are handled here.
"""

import jax
import jax.numpy as jnp


def append(
    buffer: jax.Array, new: jax.Array, layer: jax.Array | int, rows: jax.Array | None, start: jax.Array, count: jax.Array, order: str
) -> jax.Array:
    """Writes `new[b, t]` to slot `start[b] + t` of row `rows[b]`, for t < count[b]; everything else keeps its bits.

    Args:
      buffer: [L, B, ...]: the stack of one cache array, its last three axes as `order` says.
      new: [B', T, K, H].
      layer: which of the L layers.
      rows: int32 [B'], or None: row b is row b.
      start: int32 [B'], the first slot to write.
      count: int32 [B'], how many of the T are real. Slots at or past the capacity are dropped.
      order: static; "KSH" for [L, B, K, S, H], and so on.

    Returns:
      The buffer with the rows written.
    """
    B, T = new.shape[:2]
    slot_axis = order.index("S")
    slots = buffer.shape[2 + slot_axis]
    buffer, new = jnp.asarray(buffer), new.astype(buffer.dtype)
    index = jnp.arange(B) if rows is None else rows
    if T == 1:
        slot = jnp.where(count > 0, start, slots)  # idle rows write to a slot that does not exist
        where = tuple(slot if axis == "S" else slice(None) for axis in order)
        heads = new[:, 0] if order.index("K") < order.index("H") else new[:, 0].swapaxes(1, 2)
        return buffer.at[layer, index, *where].set(heads, mode="drop")

    new = new[:, :slots]
    width = new.shape[1]
    new = new.transpose(0, *(1 + "SKH".index(axis) for axis in order))  # the tokens stand where the slots do

    def write(b, buffer):
        first = jnp.clip(start[b], 0, slots - width)
        corner = [layer, index[b], 0, 0, 0]
        corner[2 + slot_axis] = first
        size = list(buffer.shape)
        size[0], size[1], size[2 + slot_axis] = 1, 1, width
        old = jax.lax.dynamic_slice(buffer, corner, size)
        token = first + jnp.arange(width) - start[b]  # which new token each slot of this window would hold
        keep = (token >= 0) & (token < count[b])
        # Only a chunk that ends past the last slot is moved; without the branch every element of every chunk pays for it.
        shift = start[b] - first
        moved = jax.lax.cond(shift == 0, lambda part: part, lambda part: jnp.roll(part, shift, axis=slot_axis), new[b])
        mask = jnp.expand_dims(keep, [axis for axis in range(3) if axis != slot_axis])
        return jax.lax.dynamic_update_slice(buffer, jnp.where(mask, moved[None, None], old), corner)

    return write(0, buffer) if B == 1 else jax.lax.fori_loop(0, B, write, buffer)
