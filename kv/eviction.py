"""Which pages the prefix tree gives up first."""

from collections import OrderedDict

from kv.pages import PageAllocator
from kv.radix import Node


def victims(resident: OrderedDict[int, tuple[Node, int]], allocator: PageAllocator, suffixes: bool, count: int) -> list[int]:
    """Chooses pages of one group so that releasing them frees `count`, or as many as can be freed.

    Least recently used first, none of a pinned path, and only pages that nobody but the tree holds: to give up another frees nothing.
    The exception: with `suffixes`, a page goes only together with what follows it, and if a page that a row holds too follows one that
    would be freed, both are given up once nothing else is left.

    Args:
      resident: the group's pages on the device, least recently used first; with `suffixes` each before those that precede it.
      allocator: of the group.
      suffixes: the group has no window.
      count: pages to free.

    Returns:
      Page ids; with `suffixes` each before those that precede it.
    """
    chosen: dict[int, None] = {}  # as an ordered set
    kept: set[Node] = set()  # a page of the node, or below it, stays
    for page, (node, _) in resident.items():
        if len(chosen) >= count:
            return list(chosen)
        if node not in kept and not node.pins and allocator.count(page) == 1:
            chosen[page] = None
        elif suffixes:
            above: Node | None = node
            while above is not None and above not in kept:
                kept.add(above)
                above = above.parent
    return list(chosen) if not suffixes else _with_held_suffixes(chosen, resident, allocator, count)


def _with_held_suffixes(
    chosen: dict[int, None], resident: OrderedDict[int, tuple[Node, int]], allocator: PageAllocator, count: int
) -> list[int]:
    freed = len(chosen)
    held: dict[Node, list[int]] = {}  # pages that a row holds too, not chosen so far
    cleared: set[Node] = set()  # all below the node is chosen
    for page, (node, _) in resident.items():
        if freed >= count:
            break
        if node.pins or page in chosen:
            continue
        if allocator.count(page) > 1:
            held.setdefault(node, []).append(page)
            continue
        for follower in [node] if node in cleared else [*node.below(), node]:
            chosen.update(dict.fromkeys(held.pop(follower, ())))
            cleared.add(follower)
        chosen[page] = None
        freed += 1
    return list(chosen)
