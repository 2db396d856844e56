"""Page pool: reference counts, prefix cache, eviction order, and no leak under random use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isomodel.rollout.pages import OutOfPages, PagePool, extend_keys

TOKENS = np.arange(100, dtype=np.int32)


def keys_of(tokens, version=0, size=16):
    return extend_keys([], np.asarray(tokens, np.int32), size, version)


def test_keys_chain_over_tokens_and_version():
    base = keys_of(TOKENS)
    assert len(base) == 6, "only full pages have names"
    assert keys_of(TOKENS[:40]) == base[:2]
    changed = TOKENS.copy()
    changed[0] += 1
    assert not set(keys_of(changed)) & set(base), "a page's name holds everything before it"
    assert not set(keys_of(TOKENS, version=1)) & set(base), "and the weight version"
    assert extend_keys(list(base[:2]), TOKENS, 16, 0) == base, "extending equals naming from scratch"


def test_allocate_share_release():
    pool = PagePool(4, 16)
    a = pool.allocate(3)
    pool.share(a[:2])
    pool.release(a)
    assert pool.available == 2
    pool.check([a[:2]])
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 of 4 available"):
        pool.allocate(3)
    pool.check([a[:2]])
    pool.release(a[:2])
    assert pool.available == 4
    with pytest.raises(ValueError, match="released twice"):
        pool.release(a[:1])
    with pytest.raises(ValueError, match="is free"):
        pool.share(a[:1])
    with pytest.raises(ValueError, match="not held"):
        pool.register(a[0], b"x")


def test_cached_pages_are_found_again_until_evicted_least_recently_used_first():
    pool = PagePool(4, 16)
    first, second = keys_of(TOKENS[:32]), keys_of(TOKENS[50:82])
    pages = {}
    for keys in (first, second):
        pages[keys[0]] = pool.allocate(2)
        for page, key in zip(pages[keys[0]], keys, strict=True):
            assert pool.register(page, key)
        pool.release(pages[keys[0]])
    assert pool.lookup(first) == pages[first[0]] and pool.available == 4
    pool.share(pool.lookup(first))  # used again: the second chain is now the older one
    pool.release(pages[first[0]])
    pool.allocate(1)
    assert pool.stats.evictions == 1
    assert pool.lookup(first) == pages[first[0]]
    assert pool.lookup(second) == pages[second[0]][:1], "a chain loses its tail first"
    pool.allocate(2)
    assert pool.lookup(second) == [] and pool.lookup(first) == pages[first[0]][:1]
    pool.check()


def test_one_content_is_registered_once():
    pool = PagePool(2, 16)
    a, b = pool.allocate(2)
    assert pool.register(a, b"k") and not pool.register(b, b"k") and not pool.register(a, b"other")
    pool.release([b])
    pool.release([a])
    pool.check()
    assert pool.lookup([b"k"]) == [a] and pool.lookup([b"other"]) == []


def test_drop_cached_forgets_idle_and_held_pages():
    pool = PagePool(3, 16)
    a, b = pool.allocate(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([b])
    assert pool.drop_cached() == 2
    assert pool.lookup([b"a"]) == pool.lookup([b"b"]) == []
    pool.check([[a]])
    assert pool.available == 2


@pytest.mark.parametrize("size", [0, 3, 24, 256])
def test_page_size_must_divide_the_attention_block(size):
    with pytest.raises(ValueError, match="does not divide 128"):
        PagePool(4, size)


def test_check_sees_a_leak():
    pool = PagePool(3, 16)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check([held[:1]])


class PoolMachine(RuleBasedStateMachine):
    """Random holders that allocate, share, register, release and drop; the model is a dict of contents."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(8, 16)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what a page was registered with, while it must not be given away
        self.serial = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        before = self.pool.available
        try:
            pages = self.pool.allocate(count)
        except OutOfPages:
            assert before < count and self.pool.available == before
            return
        assert not {p for held in self.holders for p in held} & set(pages), "a held page was given away"
        for page in pages:
            self.content.pop(page, None)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data):
        pages = data.draw(st.sampled_from(self.holders))
        self.serial += 1
        key = b"%d" % self.serial
        if self.pool.register(pages[0], key):
            self.content[pages[0]] = key

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hit(self, data):
        key = data.draw(st.sampled_from(sorted(self.content.values())))
        pages = self.pool.lookup([key])
        assert len(pages) == 1 and self.content[pages[0]] == key
        self.pool.share(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)

    @rule()
    def drop(self):
        self.pool.drop_cached()
        self.content.clear()

    @invariant()
    def consistent(self):
        self.pool.check(self.holders)

    def teardown(self):
        for pages in self.holders:
            self.pool.release(pages)
        self.pool.check([])
        assert self.pool.available == self.pool.num_pages, "pages leaked"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
