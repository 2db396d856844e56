"""Decode attention where samples hold their prompt's pages together, without a GPU: who is grouped, against plain Python, and the
kernels in the interpreter with race detection against the kernel that takes each sequence by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import attention as op
from pallas_kernels import mosaic
from pallas_kernels.attention import SPLIT, hopper_decode, hopper_shared, reference, schedules
from pallas_kernels.attention.hopper_tiles import Shape
from tests.pallas_kernels.base import bits, relative


def tables(shape: Shape, prompts, S: int, P: int):
    """(q_start, kv_len, page tables, pages) of samples, `prompts` being (positions, [positions that each sample has of its own]);
    unused sequences after them. Pages past a sequence's end are page 0, which is somebody's."""
    free = list(np.random.default_rng(0).permutation(S * P))
    table_SP, kv_len, s = np.zeros((S, P), np.int32), np.zeros(S, np.int32), 0
    for prompt, owns in prompts:
        whole = prompt // shape.page
        shared = [free.pop() for _ in range(whole)]
        for own in owns:
            need = -(-(prompt + own) // shape.page)
            table_SP[s, :need] = shared + [free.pop() for _ in range(need - whole)]
            kv_len[s] = prompt + own
            s += 1
    return np.minimum(np.arange(S + 1), s).astype(np.int32), kv_len, table_SP


def always(*_):
    """In place of `hopper_shared.pays`, which small work never does."""
    return True


@functools.partial(jax.jit, static_argnames=("shape", "share"))
def lists(shape: Shape, share: bool, where, longest):
    """What `work_list` gives for lengths up to `longest`."""
    q_start, kv_len, table_SP = where
    options = dict(share=always if share else None, shortest_S=kv_len)
    return hopper_decode.work_list(q_start, longest, table_SP, len(kv_len), shape, **options)


def grouped(shape: Shape, *where):
    """(blocks of each sequence that its group walks, the groups' tiles)."""
    return map(np.asarray, jax.jit(functools.partial(hopper_shared.groups, shape=shape, worth=always))(*map(jnp.asarray, where)))


@pytest.mark.parametrize("page, block", [(16, 128), (128, 128), (8, 64), (128, 64)])
def test_samples_of_a_prompt_are_grouped(page, block):
    """As many together as a tile has tokens, over the whole blocks of their prompt that all have a position after."""
    shape = Shape(4, 1, 64, page, block)
    long = block * 5 + 128
    prompts = [
        (long, [1, 300, 7]),
        (long, [20]),  # alone, beside a prompt as long
        (block, [1] * 17),  # a group of 16, and one that is left
        (2 * block + 128, [5] * 33),
        (7, [300, 300]),  # no whole block
        (128 + 2 * block, [40, 1]),
    ]
    where = tables(shape, prompts, S=64, P=16 * 128 // page)
    shared, tiles = grouped(shape, *where)
    want, of = [], []
    for prompt, owns in prompts:
        for i in range(0, len(owns), shape.tokens):
            members = owns[i : i + shape.tokens]
            blocks = min([prompt // page * page, *(prompt + own - 1 for own in members)]) // block
            blocks = blocks if len(members) > 1 else 0
            if blocks:
                of.append((len(want), len(want), len(members), blocks * block, blocks))
            want += [blocks] * len(members)
    assert shared.tolist() == want + [0] * (64 - len(want))
    assert [tuple(tile) for tile in tiles.tolist() if tile[2]] == of
    assert not tiles[tiles[:, 2] == 0, 4].any()


@pytest.mark.parametrize("seed", range(5))
def test_only_equal_pages_below_every_row_are_shared(seed):
    """Tables that agree anywhere and nowhere, sequences with several rows or none between others."""
    rng = np.random.default_rng(seed)
    shape, S, P = Shape(32, 2, 64, 64, 128), 40, 12
    table_SP = rng.integers(0, 9, (S, P))
    for s in range(1, S):
        table_SP[s, : rng.integers(0, P + 1) * rng.integers(0, 2)] = table_SP[s - 1, 0]
        table_SP[s] = np.where(np.arange(P) < rng.integers(0, P + 1), table_SP[s - 1], table_SP[s])
    q_start = np.concatenate([[0], np.cumsum(rng.choice([0, 1, 1, 1, 1, 1, 2], S))])
    kv_len = rng.integers(0, P * shape.page + 1, S)
    shared, tiles = grouped(shape, q_start, kv_len, table_SP)
    covered = np.zeros(S, int)
    for s, token, members, position, blocks in tiles[tiles[:, 2] > 0].tolist():
        assert 2 <= members <= shape.tokens and token == q_start[s] and position == blocks * shape.block > 0
        for m in range(s, s + members):
            assert q_start[m + 1] - q_start[m] == 1 and shared[m] == blocks
            assert blocks * shape.block < kv_len[m]
            pages = blocks * shape.block // shape.page
            assert np.array_equal(table_SP[m, :pages], table_SP[s, :pages])
        covered[s : s + members] += 1
    assert np.array_equal(covered > 0, shared > 0) and covered.max() == 1


@pytest.mark.parametrize(
    "prompts, K, paid",
    [
        ([(2048, [256] * 16)] * 16, 8, True),  # 2.6 times as fast (one H200)
        ([(512, [256] * 64)] * 4, 8, True),  # 1.3
        ([(2048, [256] * 16)], 8, False),  # a walk of 16 blocks by few programs, then the rest: 0.8
        ([(128, [256] * 8)] * 32, 8, False),  # 0.96
        ([(2048, [256] * 16)] * 16, 1, False),
    ],
)
def test_it_is_shared_where_it_pays(prompts, K, paid):
    shape = Shape(4 * K, K, 128, 64)
    where = tables(shape, prompts, S=256, P=2560 // 64)
    found = jax.jit(functools.partial(hopper_shared.groups, shape=shape))(*where)
    assert all(bool(x.any()) == paid for x in found)


def test_a_call_has_a_launch_for_shared_blocks_where_that_may_pay():
    whole = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    for share, T, S, P, launches in (
        (True, 256, 256, 32, 2),
        (False, 256, 256, 32, 1),
        (True, 8, 8, 32, 1),
        (True, 8, 8, 512, 2),
        (True, 256, 255, 32, 1),
    ):
        q, pages = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, 32, 128), (9, 64, 8, 128)))
        listed = functools.partial(op.work_list, share=share, impl="hopper")
        lists = jax.eval_shape(listed, q, pages, whole(S + 1), whole(S), whole(S, P))
        assert len(lists[0]) == len(lists[1]) == launches, (share, T, S, P)
        assert op.work_list(q, pages, None, None, jnp.zeros((S, P)), share=share, impl="reference") is None


@pytest.mark.parametrize("share", [False, True])
def test_a_shortened_list_has_the_items_of_one_made_for_the_lengths(share):
    """Samples grow over edges of blocks and splits, some less far than others; what is shared is what was at the beginning."""
    shape, grows = Shape(8, 2, 64, 32, 64, 256), 300
    prompts = [(96, [1, 40]), (320, [1] * 9 + [200] * 9), (256, [7]), (512, [20, 0, 90])]  # of the 0, the prompt's last position is not run yet
    q_start, longest, table_SP = tables(shape, [(n, [o + grows for o in own]) for n, own in prompts], S=26, P=32)
    shortest = longest - grows * (longest > 0)
    longest = shortest + np.arange(26) % 4 * 100 * (longest > 0)
    at = lambda lengths: (jnp.asarray(q_start), jnp.asarray(lengths, jnp.int32), jnp.asarray(table_SP))  # noqa: E731
    work = lists(shape, share, at(shortest), longest)
    cut = jax.jit(functools.partial(hopper_decode.shortened, shape=shape))
    unbegun = 0
    for step in (0, 1, 63, 64, 100, 191, 192, 255, 256, 257, 300):
        lengths = np.minimum(shortest + step * (shortest > 0), longest)
        made = lists(shape, False, at(lengths), lengths)
        (*groups, got), counts, *merges = map(np.asarray, cut(work, longest, lengths))
        (want,), (many,), *made_merges = map(np.asarray, made)
        begin = np.zeros(27, int)
        for s, _, members, _, blocks, *_ in (row for items in groups for row in items[: counts[0]].tolist()):
            begin[s : s + members] = blocks
        assert share == begin.any() and (begin[:26] * shape.block < np.maximum(shortest, 1)).all()
        # What a group walks is not the samples' own.
        want = [(*row[:5], max(row[5], begin[row[0]]), row[6]) for row in want[:many].tolist()]
        walked = [tuple(row) for row in got[: counts[-1]].tolist() if row[6] > row[5] or row[5] == 0]
        assert sorted(walked) == sorted(row for row in want if row[6] > row[5] or row[4] == 0), step
        unbegun += counts[-1] - len(walked)
        assert all(np.array_equal(x, y) for x, y in zip(merges, made_merges, strict=True))
        for before, after in zip(np.asarray(work[0])[:-1], groups, strict=True):
            assert np.array_equal(before, after)
    assert unbegun > 0


def test_prompts_that_begin_alike_keep_what_their_own_samples_share():
    """Three prompts behind one beginning of a block: each one's samples share the whole of it, not that block alone."""
    shape = Shape(4, 1, 64, 128, 128)
    q_start, kv_len, table_SP = tables(shape, [(512, [9] * 5), (512, [9] * 4), (512, [9]), (384, [9])], S=11, P=8)
    table_SP[:, 0] = table_SP[0, 0]
    shared, _ = grouped(shape, q_start, kv_len, table_SP)
    assert shared.tolist() == [4] * 9 + [1] * 2


@pytest.mark.parametrize("d, G, page, splits", [(64, 3, 128, 2), (128, 4, 64, 1), (256, 16, 8, 2)])
def test_both_launches_lower(d, G, page, splits):
    S, shape = 70, Shape(2 * G, 2, d, page)
    whole = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    rows = jax.ShapeDtypeStruct((40 * page, 2 * d), jnp.bfloat16)
    where = whole(S + 1), whole(S), whole(S, splits * SPLIT // page)

    def run(q, k, v, *where):
        *where, layer = where
        work = hopper_decode.work_list(*where, S, shape, share=hopper_shared.pays)
        return hopper_decode.attention(q, k, v, *where, layer, shape, work=work)

    q = jax.ShapeDtypeStruct((S, shape.H, d), jnp.bfloat16)
    text = jax.jit(run).trace(q, rows, rows, *where, whole(1)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == (2 if splits == 1 else 3)
    # The second launch writes its parts beside the first one's, in place.
    assert text.count("output_operand_alias<") == (0 if splits == 1 else 3)


@pytest.mark.parametrize(
    "shape, prompts, P, pairs",
    [
        # What is shared ends inside the first split, a block after it, and with it.
        (Shape(2, 1, 64, 32, 64, 128), [(96, [40, 1]), (192, [1, 70, 3]), (128, [10, 20])], 12, 1),
        # One split; a group that fills a tile, and one sequence that is left over.
        (Shape(16, 1, 64, 64, 64), [(64, [1, 9, 2, 60, 1])], 2, 2),
    ],
)
def test_shared_blocks_have_the_bits_of_each_sequence_alone_in_the_interpreter(shape, prompts, P, pairs, monkeypatch):
    monkeypatch.setattr(mosaic, "SMS", 2)
    S, page = sum(len(owns) for _, owns in prompts) + 1, shape.page
    q_start, kv_len, table_SP = where = tables(shape, prompts, S, P)
    rng = np.random.default_rng(1)
    k, v = (np.full((S * P, page, 1, shape.d), np.nan, np.float32) for _ in range(2))
    for s, n in enumerate(kv_len):  # what is shared is written anew with each of its readers
        at = np.arange(n)
        for x in (k, v):
            x[table_SP[s, at // page], at % page] = rng.standard_normal((n, 1, shape.d))
    q = 2 * rng.standard_normal((S, shape.H, shape.d))
    q[q_start[-1] :] = np.nan
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    where, results = [jnp.asarray(x) for x in where], {}
    longest = jnp.minimum(where[1] + 90 * (where[1] > 0), P * page)
    for share, work in (
        (False, lists(shape, False, where, where[1])),
        (True, hopper_decode.shortened(lists(shape, True, where, longest), longest, where[1], shape)),
    ):

        def run(q, k, v, where, work):
            flat, layer = (x.reshape(-1, shape.d) for x in (k, v)), jnp.zeros((1,), jnp.int32)
            return hopper_decode.attention(q, *flat, *where, layer, shape, schedules.Few(pairs, 2, overlap=False), work)

        with mosaic.interpreted():
            results[share] = [np.asarray(x) for x in jax.jit(run)(q, k, v, where, work)]
        assert not gpu_callbacks.get_races().races_found, share
    (o, lse), (shared_o, shared_lse) = results[False], results[True]
    assert work[1][0] > 0  # something was shared
    assert np.array_equal(bits(o), bits(shared_o)) and np.array_equal(bits(lse), bits(shared_lse))
    want, _ = reference.attention(q, k, v, *where, None)
    used = q_start[-1]
    assert relative(shared_o[:used], want[:used]) < 5e-3
    assert not np.asarray(shared_o[used:], np.float32).any() and not shared_lse[used:].any()
