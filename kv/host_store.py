"""Pages that were moved off the device, within a limit of bytes."""

import collections
import itertools
import weakref

from kv.offload import HostPages
from runtime import UserError


class Handle:
    """Stands for what `HostStore.put` was given. When the last reference to a handle is gone, so is the content."""

    __slots__ = ("__weakref__", "_content", "_key")

    def __init__(self, key: int, content: HostPages):
        self._key = key
        self._content: HostPages | None = content


class HostStore:
    """Contents of pages in host memory, `limit_bytes` of them at most: the least recently used give way.

    Fits `PrefixTree`'s `on_evict`, which gives a handle per page: `[store.put(page) for page in read_pages(...).split()]`. The tree drops
    handles in an order of its own; to have no other, call its `evict_parked` until `free_bytes` is enough. Not thread-safe.

    Attributes:
      limit_bytes: of all contents together.
      evicted: how many contents gave way so far.
    """

    def __init__(self, limit_bytes: int):
        """Raises UserError if limit_bytes is below 0."""
        if limit_bytes < 0:
            raise UserError(f"a host store of {limit_bytes} bytes is below 0: give 0 to keep nothing, or more")
        self.limit_bytes = limit_bytes
        self.evicted = 0
        self._held: collections.OrderedDict[int, tuple[weakref.ref[Handle], int]] = collections.OrderedDict()  # least recently used first
        self._bytes = 0
        self._keys = itertools.count()
        self._collected: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        self._settle()
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Of the contents held."""
        self._settle()
        return self._bytes

    @property
    def free_bytes(self) -> int:
        """What fits without anything giving way."""
        return self.limit_bytes - self.nbytes

    def put(self, content: HostPages) -> Handle | None:
        """Keeps a content, in exchange for the least recently used ones where there is no room; None if it alone is above the limit."""
        size = content.nbytes
        if size > self.limit_bytes:
            return None
        while self.free_bytes < size:
            self._remove(next(iter(self._held)))
            self.evicted += 1
        handle, collected = Handle(key := next(self._keys), content), self._collected
        # A handle may be collected at any point of the program, this class's methods included: that it is gone is counted later.
        self._held[key] = weakref.ref(handle, lambda _: collected.append(key)), size
        self._bytes += size
        return handle

    def get(self, handle: Handle) -> HostPages | None:
        """The content, from now on the most recently used; None if it gave way or was dropped, or was never here."""
        if not self._holds(handle):
            return None
        self._held.move_to_end(handle._key)
        return handle._content

    def drop(self, handle: Handle) -> None:
        """Frees a content; nothing happens if it is not here any more."""
        if self._holds(handle):
            self._remove(handle._key)

    def _holds(self, handle: Handle) -> bool:
        self._settle()
        return handle._key in self._held and self._held[handle._key][0]() is handle

    def _remove(self, key: int) -> None:
        reference, size = self._held.pop(key)
        self._bytes -= size
        handle = reference()
        if handle is not None:
            handle._content = None

    def _settle(self) -> None:
        """Strikes out handles that were collected."""
        while self._collected:
            key = self._collected.popleft()
            if key in self._held:
                self._remove(key)
