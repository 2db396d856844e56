"""Hopper attention's bits on the GPU: a row has its own in training, prefill and decode, in any packing, chunking and paging."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention as op
from pallas_kernels.attention import BLOCK, SPLIT, hopper, hopper_decode, hopper_forward, schedules
from pallas_kernels.attention.hopper_tiles import Shape
from tests.pallas_kernels.base import differ, errors, relative

EDGES = [*range(1, 301), *(e + i for e in (SPLIT, 2 * SPLIT) for i in (-1, 0, 1))]
"""KV lengths: every one up to 300, and around the ends of splits."""


@dataclasses.dataclass
class Sequence:
    """q [n, H, d], k and v [n, K, d] of one sequence, fp32 values of bf16; its running maximum moves."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def draw(cls, n: int, K: int, G: int, d: int, seed: int) -> Sequence:
        rng = np.random.default_rng(seed)
        round_ = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)  # noqa: E731
        q, k, v = (round_(rng.standard_normal((n, h, d)) * s) for h, s in ((K * G, 2), (K, 2), (K, 1)))
        return cls(q, k, v * np.exp2(rng.integers(-6, 6, (n, 1, 1))))


@dataclasses.dataclass
class Pool:
    """Pages that hold sequences; whatever else is in them is NaN."""

    k_pages: np.ndarray
    v_pages: np.ndarray
    tables: np.ndarray  # [sequences, P]

    @classmethod
    def of(
        cls, sequences: list[Sequence], page: int, seed: int = 0, P: int | None = None, pages: int | None = None
    ) -> Pool:
        K, d = sequences[0].k.shape[1:]
        need = [-(-len(s.k) // page) for s in sequences]
        pages = pages or sum(need) + 7
        free = list(np.random.default_rng(seed).permutation(pages))
        k_pages, v_pages = (np.full((pages, page, K, d), np.nan, np.float32) for _ in range(2))
        tables = np.full((len(sequences), P or max(need)), -1, np.int32)
        for i, s in enumerate(sequences):
            own = np.array([free.pop() for _ in range(need[i])])
            at = np.arange(len(s.k))
            k_pages[own[at // page], at % page] = s.k
            v_pages[own[at // page], at % page] = s.v
            tables[i, : need[i]] = own
        return cls(k_pages, v_pages, tables)


@functools.partial(jax.jit, static_argnames=("kernel", "schedule", "share"))
def _run(kernel, q, k_pages, v_pages, q_start, kv_len, tables, schedule=None, share=False, bounds=None):
    N, page, K, d = k_pages.shape
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (BLOCK // page))))
    flat = (x.reshape(N * page, K * d) for x in (k_pages, v_pages))
    shape, where = Shape(q.shape[1], K, d, page), (q_start, kv_len, tables)
    lists, sharing = None, (lambda *_: True) if share else None
    if bounds is not None:
        shortest, longest = bounds
        lists = hopper_decode.work_list(q_start, longest, tables, len(q), shape, sharing, shortest)
        lists = hopper_decode.shortened(lists, longest, kv_len, shape)
    elif share:
        lists = hopper_decode.work_list(*where, len(q), shape, sharing)
    return kernel.attention(q, *flat, *where, jnp.zeros((1,), jnp.int32), shape, schedule, lists)


def run(kernel, work, pool: Pool, T: int | None = None, schedule=None, share: bool = False, bounds=None):
    """(o [rows, H, d], log-sum-exp [rows, H]) of `work`, a list of (sequence, its index in the pool, start, stop): rows
    [start, stop), of which keys up to `stop` are there. Rows up to T are padding. share: pages of several sequences are read
    once for all of them; only with a row for each sequence. bounds: lists are made for lengths between these two, and shortened."""
    queries = [s.q[start:stop] for s, _, start, stop in work]
    total = sum(map(len, queries))
    padding = np.full(((T or total) - total, *queries[0].shape[1:]), np.nan, np.float32)
    q = jnp.asarray(np.concatenate([*queries, padding]), jnp.bfloat16)
    q_start = jnp.asarray(np.cumsum([0] + [len(x) for x in queries]), jnp.int32)
    kv_len = jnp.asarray([stop for *_, stop in work], jnp.int32)
    tables = jnp.asarray(pool.tables[[i for _, i, _, _ in work]])
    paged = (jnp.asarray(x, jnp.bfloat16) for x in (pool.k_pages, pool.v_pages))
    o, lse = jax.block_until_ready(_run(kernel, q, *paged, q_start, kv_len, tables, schedule, share, bounds))
    assert not np.asarray(o[total:], np.float32).any() and not np.asarray(lse[total:]).any(), "padding gives zeros"
    o, lse = np.asarray(o[:total]), np.asarray(lse[:total])
    assert np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    return o, lse


def different(got, want) -> int:
    """Values of (o, log-sum-exp) whose bits differ."""
    return sum([differ(g, w) for g, w in zip(got, want, strict=True)])


def at(results, index):
    return tuple(x[index] for x in results)


def exact(s: Sequence) -> np.ndarray:
    n, H, d = s.q.shape
    G = H // s.k.shape[1]
    out = np.zeros((n, H, d))
    for h in range(H):
        q, k, v = (x.astype(np.float64) for x in (s.q[:, h], s.k[:, h // G], s.v[:, h // G]))
        x = q @ k.T / math.sqrt(d)
        x[np.triu_indices(n, 1)] = -np.inf
        p = np.exp(x - x.max(1, keepdims=True))
        out[:, h] = p / p.sum(1, keepdims=True) @ v
    return out


@pytest.mark.parametrize("d, G, page", [(64, 3, 16), (128, 4, 128), (128, 16, 8), (256, 1, 128)])
def test_decode_has_the_bits_of_training_at_every_length(d, G, page):
    s = Sequence.draw(max(EDGES), 1, G, d, seed=d + G)
    training = run(hopper_forward, [(s, 0, 0, len(s.q))], Pool.of([s], page))
    lengths = np.array(EDGES)
    pool = Pool.of([s], page, seed=1)  # other pages
    decode = run(hopper_decode, [(s, 0, n - 1, n) for n in lengths], pool)
    assert different(decode, at(training, lengths - 1)) == 0
    # Control: with one key less the same rows differ.
    less = dataclasses.replace(s, q=np.roll(s.q, -1, 0))
    assert (
        different(run(hopper_decode, [(less, 0, n - 1, n) for n in lengths], pool), at(training, lengths % len(s.q)))
        > len(EDGES) // 2
    )


@pytest.fixture(scope="module")
def packed():
    """Sequences and their results in one call, with padding rows."""
    lengths = (300, 1, 129, SPLIT + 50, 64)
    sequences = [Sequence.draw(n, 2, 4, 128, seed=n) for n in lengths]
    pool = Pool.of(sequences, page=64)
    T = sum(lengths) + 11
    return sequences, pool, T, run(hopper_forward, [(s, i, 0, len(s.q)) for i, s in enumerate(sequences)], pool, T)


def pieces(sequences):
    ends = np.cumsum([len(s.q) for s in sequences])
    return [np.arange(e - len(s.q), e) for e, s in zip(ends, sequences, strict=True)]


def test_packed_is_alone_in_any_order(packed):
    sequences, pool, T, together = packed
    for i, (s, rows) in enumerate(zip(sequences, pieces(sequences), strict=True)):
        # Empty sequences beside it keep the call's sizes, and so its compiled kernel.
        work = [(s, i, 0, len(s.q))] + [(sequences[0], 0, 300, 300)] * (len(sequences) - 1)
        assert different(run(hopper_forward, work, pool, T), at(together, rows)) == 0
    order = [3, 0, 4, 2, 1]
    again = run(hopper_forward, [(sequences[i], i, 0, len(sequences[i].q)) for i in order], pool, T)
    rows = pieces(sequences)
    assert different(again, at(together, np.concatenate([rows[i] for i in order]))) == 0
    assert different(run(hopper_decode, [(s, i, 0, len(s.q)) for i, s in enumerate(sequences)], pool, T), together) == 0


def test_nan_of_a_neighbour_reaches_nobody(packed):
    sequences, pool, T, together = packed
    for ill in (0, 3):
        bad = Sequence(*(np.full_like(x, np.nan) for x in dataclasses.astuple(sequences[ill])))
        others = [bad if i == ill else s for i, s in enumerate(sequences)]
        sick = Pool.of(others, page=64)
        q = jnp.asarray(np.concatenate([s.q for s in others] + [np.full((11, 8, 128), np.nan)]), jnp.bfloat16)
        lengths = [len(s.q) for s in others]
        where = (
            jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(sick.tables),
        )
        paged = (jnp.asarray(x, jnp.bfloat16) for x in (sick.k_pages, sick.v_pages))
        got = tuple(map(np.asarray, _run(hopper_forward, q, *paged, *where)))
        rows = pieces(sequences)
        assert np.isnan(got[0][rows[ill]].astype(np.float32)).any()
        healthy = np.concatenate([r for i, r in enumerate(rows) if i != ill])
        assert different(at(got, healthy), at(together, healthy)) == 0


def test_duplicates_are_equal(packed):
    sequences, pool, T, together = packed
    twice = [sequences[0], sequences[0], sequences[2], sequences[0], sequences[0]]
    got = run(hopper_forward, [(s, i, 0, len(s.q)) for s, i in zip(twice, (0, 0, 2, 0, 0), strict=True)], pool, T)
    for rows in pieces(twice)[:2] + pieces(twice)[3:]:
        assert different(at(got, rows), at(together, np.arange(300))) == 0


def test_prefill_may_be_cut_anywhere(packed):
    sequences, pool, T, together = packed
    s, n = sequences[3], len(sequences[3].q)
    whole = at(together, pieces(sequences)[3])
    nothing = [(sequences[0], 0, 300, 300)] * (len(sequences) - 1)
    for cut in (1, 15, 16, 127, 128, 129, 1000, SPLIT - 1, SPLIT, SPLIT + 1, n - 1):
        for kernel in (hopper_forward, hopper_decode):
            chunks = [run(kernel, [(s, 3, a, b), *nothing], pool, T) for a, b in ((0, cut), (cut, n))]
            assert different([np.concatenate(x) for x in zip(*chunks, strict=True)], whole) == 0, (cut, kernel.__name__)


def test_no_schedule_reaches_the_bits(packed):
    sequences, pool, T, together = packed
    work = [(s, i, 0, len(s.q)) for i, s in enumerate(sequences)]
    other = schedules.Many(warpgroups=2, slots=3, overlap=False, park_in_shared=False, turns=False)
    assert different(run(hopper_forward, work, pool, T, other), together) == 0


@pytest.mark.parametrize("d", [128, 256])
def test_error_is_no_larger_than_cudnns(d):
    s = Sequence.draw(SPLIT + 50, 2, 4, d, seed=SPLIT + 50)
    q, k, v = (jnp.asarray(x, jnp.bfloat16)[None] for x in dataclasses.astuple(s))
    cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))(q, k, v)[0]
    mine, _ = run(hopper_forward, [(s, 0, 0, len(s.q))], Pool.of([s], page=64))
    ours, theirs = errors(f"forward, {len(s.q)} tokens, head_dim {d}, a peaked softmax", mine, cudnn, exact(s))
    assert ours <= 1.02 * theirs


PROMPTS = [(2 * SPLIT, 20), (SPLIT + 300, 18), (2 * BLOCK, 2), (100, 3), (700, 1), (1000, 17)]
"""Positions of prompts, and how many samples have each."""


def samples(G: int, d: int, page: int):
    """(sequences, each with its prompt in pages of its own; the same pool, but whole pages of a prompt are its first sample's)."""
    sequences, firsts = [], []
    for prompt, number in PROMPTS:
        firsts += [(len(sequences), prompt // page)] * number
        own = np.random.default_rng(prompt).integers(1, 500, number)
        sequences += [Sequence.draw(prompt + n, 2, G, d, seed=len(sequences) + i) for i, n in enumerate(own)]
    for s, (first, pages) in zip(sequences, firsts, strict=True):
        for mine, its in ((s.k, sequences[first].k), (s.v, sequences[first].v)):
            mine[: pages * page] = its[: pages * page]
    apart = Pool.of(sequences, page)
    together = Pool(apart.k_pages.copy(), apart.v_pages.copy(), apart.tables.copy())
    for i, (first, pages) in enumerate(firsts):
        if i != first:
            for x in (together.k_pages, together.v_pages):
                x[apart.tables[i, :pages]] = np.nan
            together.tables[i, :pages] = apart.tables[first, :pages]
    return sequences, apart, together


@pytest.mark.parametrize("d, G, page", [(64, 3, 16), (128, 1, 128), (128, 4, 64), (256, 16, 8)])
def test_samples_that_share_their_prompts_pages_have_the_bits_of_those_that_do_not(d, G, page):
    sequences, apart, together = samples(G, d, page)
    work = [(s, i, len(s.q) - 1, len(s.q)) for i, s in enumerate(sequences)]
    work += [(sequences[0], 0, 9, 9)] * 3  # without rows, as an engine pads its steps
    shared = run(hopper_decode, work, together, len(work), share=True)
    for kernel, pool, share in (
        (hopper_decode, apart, False),
        (hopper_decode, together, False),
        (hopper_decode, apart, True),
        (hopper_forward, apart, False),
    ):
        assert different(run(kernel, work, pool, len(work), share=share), shared) == 0, (kernel.__name__, share)
    # Control: a page of the first prompt is read by its samples, and by nobody else.
    together.v_pages[together.tables[1, 0]] *= -1
    changed = run(hopper_decode, work, together, len(work), share=True)
    rows = {i for i, (x, y) in enumerate(zip(changed[0], shared[0], strict=True)) if differ(x, y)}
    assert rows <= set(range(PROMPTS[0][1])) and len(rows) > PROMPTS[0][1] // 2  # of some rows it may have next to no weight


@pytest.mark.parametrize("d, G, page, share", [(64, 3, 16, False), (128, 4, 64, True), (256, 16, 8, True)])
def test_lists_that_a_loop_shortens_give_the_bits_of_lists_made_in_each_step(d, G, page, share):
    """Samples grow by one position a step until each is done, over the ends of blocks and splits."""
    sequences, apart, together = samples(G, d, page)
    longest = np.array([len(s.q) for s in sequences] + [0] * 3, np.int32)
    grows = np.minimum(longest - 1, np.array([300, 150, 0, 500, 1])[np.arange(len(longest)) % 5])
    shortest = np.where(longest > 0, longest - grows, 0).astype(np.int32)
    last = None
    for step in (0, 1, 2, 50, 100, 128, 300, 500):
        lengths = np.minimum(shortest + step * (longest > 0), longest)
        work = [(s, i, n - 1, n) for i, (s, n) in enumerate(zip(sequences, lengths, strict=False))]
        work += [(sequences[0], 0, 0, 0)] * 3  # without rows, as an engine pads its steps
        bounds = jnp.asarray(shortest), jnp.asarray(longest)
        got = run(hopper_decode, work, together if share else apart, len(work), share=share, bounds=bounds)
        assert different(got, run(hopper_decode, work, apart, len(work))) == 0, step
        assert last is None or different(got, last) > 0  # some sample is longer than before
        last = got
    assert different(got, run(hopper_forward, work, apart, len(work))) == 0


def test_the_op_serves_both_kernels_and_a_layer_of_a_stack():
    s = Sequence.draw(700, 8, 8, 128, seed=7)
    pool = Pool.of([s], page=16)
    k, v = (jnp.asarray(np.stack([np.full_like(x, np.nan), x]), jnp.bfloat16) for x in (pool.k_pages, pool.v_pages))
    attend = jax.jit(functools.partial(op.attention, region="r", impl="hopper"))
    q = jnp.asarray(s.q, jnp.bfloat16)
    where = lambda *x: (jnp.asarray(y, jnp.int32) for y in x)  # noqa: E731
    assert not hopper.few_rows(700, 1, Shape(64, 8, 128, 16)) and hopper.few_rows(1, 1, Shape(64, 8, 128, 16))
    many = attend(q, k, v, *where([0, 700], [700], pool.tables), layer=jnp.int32(1))
    one = q[650:651], k, v, *where([0, 1], [651], pool.tables)
    work = op.work_list(*one[:2], *one[3:], impl="hopper")  # once for all layers, as a model has it
    few = attend(*one, layer=jnp.int32(1), work=work)
    assert differ(few[0], many[650]) == 0
    assert relative(many, exact(s)) < 4e-3
