"""Who holds which page of a pool: reference counts on the host, the pages' contents are the device's business."""

from runtime import UserError


class OutOfPages(UserError):
    """Fewer pages are free than were asked for; nothing was taken. Evict at least `requested - free` pages and try again."""

    def __init__(self, requested: int, free: int, num_pages: int):
        super().__init__(
            f"{requested} pages are needed, {free} of {num_pages} are free: evict cached prefixes, end a request or enlarge the pool"
        )
        self.requested = requested
        self.free = free


class PageAllocator:
    """Reference counts of the P pages of one pool; every operation takes constant time per page.

    A page is free (count 0), or held by `count` holders: the page tables of rows and the prefix tree. Who holds the only reference may
    write to the page, all others read it or copy it first.

    The page freed last is handed out first: a pool that is never full then touches few of its pages, which matters where memory is
    committed on first write (CPU), and a reader of a page that it gave back sees foreign contents at once instead of rarely.
    A fresh pool hands out 0, 1, 2, ...
    """

    def __init__(self, num_pages: int):
        """Raises UserError if num_pages, P, is below 1."""
        if num_pages < 1:
            raise UserError(f"a pool of {num_pages} pages is below 1: give at least 1")
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._shared = 0

    @property
    def num_pages(self) -> int:
        """P; also what a page table says where there is no page."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._counts) - len(self._free)

    @property
    def num_shared(self) -> int:
        """Pages with more than one holder."""
        return self._shared

    def alloc(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one reference, the caller's.

        Raises:
          OutOfPages: fewer are free; none is taken then.
          ValueError: count is negative.
        """
        if count < 0:
            raise ValueError(f"can't allocate {count} pages: give at least 0")
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), len(self._counts))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held. ValueError: it is free, or no page of the pool."""
        count = self._held(page, "share")
        self._shared += count == 1
        self._counts[page] = count + 1

    def release(self, page: int) -> bool:
        """One holder less. ValueError: the page is free already, or no page of the pool.

        Returns:
          Whether that freed it.
        """
        count = self._held(page, "release")
        self._shared -= count == 2
        self._counts[page] = count - 1
        if count == 1:
            self._free.append(page)
        return count == 1

    def count(self, page: int) -> int:
        """How many hold the page; 0 if it is free. ValueError: no page of the pool."""
        if not 0 <= page < len(self._counts):
            raise ValueError(f"page {page} is outside the pool's 0..{len(self._counts) - 1}")
        return self._counts[page]

    def writable(self, page: int) -> bool:
        """Whether the page's one holder may write to it: nobody else reads it. ValueError: no page of the pool."""
        return self.count(page) == 1

    def _held(self, page: int, verb: str) -> int:
        count = self.count(page)
        if not count:
            raise ValueError(f"can't {verb} page {page}: it has 0 references, at least 1 is needed")
        return count
