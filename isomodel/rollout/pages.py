"""Pages of the KV cache: who holds which, which later requests may read again, which goes first when room is short."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

KV_BLOCK = 128
"""Page tables are padded to so many positions: pages and attention's blocks of keys divide it, so that no page can show."""

Key = bytes
"""Name of a full page's content: a digest of the weight version and of every token up to the page's end."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was allocated."""


@dataclasses.dataclass
class PoolStats:
    """Counters since the pool was made.

    Attributes:
      queries: full pages that admissions asked the prefix cache for.
      hits: how many of them it held.
      evictions: cached pages given up, least recently used first, because an allocation needed room.
      dropped: cached pages dropped because the weights changed.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    dropped: int = 0


def root_key(version: int) -> Key:
    """First link of the chain. Holds the weight version, so that a page of other weights is never found."""
    return hashlib.blake2b(b"weights %d" % version, digest_size=16).digest()


def extend_keys(keys: list[Key], tokens: np.ndarray, page_size: int, version: int) -> list[Key]:
    """Appends to `keys` the names of the pages that `tokens` (int32 [n]) fills and that `keys` does not name yet.

    Key i is a 128-bit BLAKE2b digest of key i - 1 and the page's token ids (the chain of vLLM's prefix cache): two
    pages have one name only if everything before them is equal too. Returns `keys`.
    """
    for i in range(len(keys), len(tokens) // page_size):
        parent = keys[i - 1] if i else root_key(version)
        content = np.ascontiguousarray(tokens[i * page_size : (i + 1) * page_size], np.int32).tobytes()
        keys.append(hashlib.blake2b(parent + content, digest_size=16).digest())
    return keys


class PagePool:
    """Reference-counted pages. Each page is in one of three states:

    - free: nobody holds it and its content is forgotten;
    - idle: nobody holds it, but the prefix cache knows its content under a key; it is reused when no page is free;
    - held: referenced once or more; its content may be cached as well.

    Everything is deterministic: the same calls give the same pages.
    """

    def __init__(self, num_pages: int, page_size: int):
        """Raises ValueError when a size is out of range."""
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: the pool needs at least one page")
        if page_size < 1 or KV_BLOCK % page_size:
            raise ValueError(f"page_size={page_size} does not divide {KV_BLOCK}; use 1, 2, 4, 8, 16, 32, 64 or 128")
        self.num_pages = num_pages
        self.page_size = page_size
        self.stats = PoolStats()
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # least recently used first
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages whose content the prefix cache knows, held or idle."""
        return len(self._page_of)

    def refs(self, page: int) -> int:
        """How many holders a page has."""
        return self._refs[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference; their content is undefined.

        Free pages go first, then idle ones, least recently used first.

        Raises:
          OutOfPages: fewer than `count` are available; nothing has changed.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} of {self.num_pages} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
                self.stats.evictions += 1
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page; an idle page becomes held again.

        Raises:
          ValueError: a page is free: its content is gone.
        """
        for page in pages:
            if not self._refs[page]:
                if page not in self._idle:
                    raise ValueError(f"page {page} is free; only held or cached pages can be shared")
                del self._idle[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page. The last holder's release makes a cached page idle, any other page free.

        Pages are given in sequence order and released from the end, so that a chain is evicted from its tail.

        Raises:
          ValueError: a page is not held.
        """
        for page in reversed(pages):
            if not self._refs[page]:
                raise ValueError(f"page {page} is not held; it was released twice")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def lookup(self, keys: Sequence[Key]) -> list[int]:
        """Pages of the longest prefix of `keys` that is cached. Takes no reference: `share` them before allocating."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: Key) -> bool:
        """Tells the prefix cache that a held, fully written page has the content `key`.

        Returns False, changing nothing, when the page is registered or another page already has that content.

        Raises:
          ValueError: the page is not held.
        """
        if not self._refs[page]:
            raise ValueError(f"page {page} is not held; only held pages can be registered")
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def drop_cached(self) -> int:
        """Forgets all cached content; idle pages become free, held ones stay held. Returns how many were forgotten."""
        dropped = len(self._page_of)
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self.stats.dropped += dropped
        return dropped

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Verifies every invariant; with `holders` (the pages of each holder), that references are exactly theirs.

        Raises:
          AssertionError: naming all faults found.
        """
        faults = []
        free, idle = set(self._free), set(self._idle)
        if len(free) != len(self._free):
            faults.append("a page is twice in the free list")
        for page, refs in enumerate(self._refs):
            states = (page in free) + (page in idle) + (refs > 0)
            if refs < 0 or states != 1:
                faults.append(f"page {page}: refs {refs}, free {page in free}, idle {page in idle}")
            if page in free and page in self._key_of:
                faults.append(f"page {page} is free and cached")
            if page in idle and page not in self._key_of:
                faults.append(f"page {page} is idle but not cached")
        if {key: page for page, key in self._key_of.items()} != self._page_of:
            faults.append("keys and pages of the prefix cache do not match one to one")
        if holders is not None:
            counts = collections.Counter(page for pages in holders for page in pages)
            for page, refs in enumerate(self._refs):
                if refs != counts[page]:
                    faults.append(f"page {page}: {refs} references, {counts[page]} holders")
        if faults:
            raise AssertionError("page pool: " + "; ".join(faults))
