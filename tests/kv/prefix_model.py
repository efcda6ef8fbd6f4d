"""What the prefix tree should do, told with one dictionary and no tree: an entry for every sequence of whole pages."""

from collections import Counter

Key = tuple  # (namespace, token ids of whole pages)


class PrefixModel:
    """`entries[key][group]` is a page id, a `Parked` number (a negative int) or None; orders are least recently used first."""

    def __init__(self, page_size, windows):
        self.page_size, self.windows = page_size, windows
        self.entries: dict[Key, list[int | None]] = {}
        self.device: list[list[Key]] = [[] for _ in windows]
        self.parked: list[list[Key]] = [[] for _ in windows]
        self.pins: Counter[Key] = Counter()

    def keys(self, namespace, tokens, pages):
        return [(namespace, tuple(tokens[: (index + 1) * self.page_size])) for index in range(pages)]

    def needed(self, window, pages):
        """Pages that hold a position that the query at `pages` * C sees, position by position."""
        query = pages * self.page_size
        seen = [position for position in range(query) if window is None or query - position < window]
        return sorted({position // self.page_size for position in seen})

    def match(self, namespace, tokens, limit, grid):
        """The longest length in pages that every group can serve: all are tried."""
        most = min(limit, len(tokens)) // self.page_size
        return max(
            pages
            for pages in range(0, most + 1, grid)
            if all(key in self.entries for key in self.keys(namespace, tokens, pages))
            and all(
                self.entries[self.keys(namespace, tokens, pages)[index]][group] is not None
                for group, window in enumerate(self.windows)
                for index in self.needed(window, pages)
            )
        )

    def use(self, namespace, tokens, pages):
        keys = self.keys(namespace, tokens, pages)
        for group, window in enumerate(self.windows):
            for index in reversed(self.needed(window, pages)):
                for order in (self.device[group], self.parked[group]):
                    if keys[index] in order:
                        order.remove(keys[index])
                        order.append(keys[index])

    def pin(self, namespace, tokens, pages, by):
        for key in self.keys(namespace, tokens, pages):
            self.pins[key] += by
        self.sweep()

    def fill(self, namespace, tokens, rows):
        """Stores what is not on the device yet; how many."""
        stored = 0
        for index, key in enumerate(self.keys(namespace, tokens, len(rows[0]))):
            entry = self.entries.setdefault(key, [None] * len(self.windows))
            for group, row in enumerate(rows):
                if row[index] is not None and (entry[group] is None or entry[group] < 0):
                    if entry[group] is not None:
                        self.parked[group].remove(key)
                    entry[group] = row[index]
                    self.device[group].append(key)
                    stored += 1
        self.sweep()
        return stored

    def victims(self, group, count, references):
        """Keys whose pages go, in order: `references(page)` is what all hold of it, the tree included."""
        chosen = []

        def pages_after(key):
            after = [other for other in self.device[group] if other != key and extends(other, key)]
            return [] if self.windows[group] is not None else [other for other in after if other not in chosen]

        def free_with_the_tree(key):
            return not self.pins[key] and references(self.entries[key][group]) == 1

        for key in self.device[group]:
            if len(chosen) < count and free_with_the_tree(key) and not pages_after(key):
                chosen.append(key)
        freed = len(chosen)
        for key in self.device[group]:
            if freed < count and free_with_the_tree(key) and key not in chosen:
                chosen += [*sorted(pages_after(key), key=lambda other: -len(other[1])), key]
                freed += 1
        return chosen, freed

    def give_up(self, group, keys, handles):
        for key, handle in zip(keys, handles, strict=True):
            self.device[group].remove(key)
            self.entries[key][group] = handle
            if handle is not None:
                self.parked[group].append(key)
        self.sweep()

    def evict_parked(self, group, count):
        before = len(self.parked[group])
        for key in [key for key in self.parked[group] if not self.pins[key]][:count]:
            self.parked[group].remove(key)
            self.entries[key][group] = None
        self.sweep()
        return before - len(self.parked[group])

    def clear(self, namespace):
        for key in [key for key in self.entries if key[0] == namespace]:
            self.forget(key)

    def forget(self, key):
        for group, held in enumerate(self.entries.pop(key)):
            if held is not None:
                (self.parked if held < 0 else self.device)[group].remove(key)

    def sweep(self):
        """Where a group without window has nothing, nothing that follows is of use; nor is an end where no group has anything."""
        for key in sorted(self.entries, key=lambda key: -len(key[1])):
            above = [other for other in self.entries if extends(key, other)]
            if any(window is None and self.entries[other][group] is None for other in above for group, window in enumerate(self.windows)):
                self.forget(key)
        for key in sorted(self.entries, key=lambda key: -len(key[1])):
            below = any(other != key and extends(other, key) for other in self.entries)
            if not below and not self.pins[key] and all(held is None for held in self.entries[key]):
                self.forget(key)

    def pages(self, group):
        return Counter(self.entries[key][group] for key in self.device[group])


def extends(key, prefix):
    return key[0] == prefix[0] and key[1][: len(prefix[1])] == prefix[1]
