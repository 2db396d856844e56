"""Hopper attention without a GPU: its tables against plain Python, its kernels in the interpreter with race detection, every
schedule lowered. The interpreter's products are not a tensor core's: what a row's bits depend on is in tests/gpu too."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import attention as op
from pallas_kernels import mosaic, registry
from pallas_kernels.attention import (
    BLOCK,
    SPLIT,
    hopper,
    hopper_decode,
    hopper_forward,
    hopper_tiles,
    kv_block,
    reference,
    schedules,
)
from pallas_kernels.attention.hopper_tiles import Deal, Shape
from tests.pallas_kernels.base import bits, relative

KERNELS = {"many rows": hopper_forward, "few rows": hopper_decode}
TABLES = {"many rows": schedules.MANY, "few rows": schedules.FEW}


def operands(T: int, S: int, P: int, shape: Shape, pages: int = 40, layers: int | None = None):
    """Shapes of what the op takes, and the layer."""
    lead = () if layers is None else (layers,)
    paged = jax.ShapeDtypeStruct((*lead, pages, shape.page, shape.K, shape.d), jnp.bfloat16)
    whole = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    q = jax.ShapeDtypeStruct((T, shape.H, shape.d), jnp.bfloat16)
    return q, paged, paged, whole(S + 1), whole(S), whole(S, P)


def lower(f, *shapes) -> str:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("G, page", [(1, 64), (3, 128), (16, 8)])
@pytest.mark.parametrize("kernel, d", [(name, d) for name, table in TABLES.items() for d in table])
def test_every_schedule_lowers(kernel, d, G, page):
    """Groups that fill 64 rows and one that does not, pages of a block and of less."""
    shape = Shape(2 * G, 2, d, page)
    q, paged, _, *where = operands(300, 3, 2 * SPLIT // page, shape)
    rows = jax.ShapeDtypeStruct((40 * page, 2 * d), jnp.bfloat16)
    run = functools.partial(KERNELS[kernel].attention, shape=shape)
    text = lower(run, q, rows, rows, *where, jax.ShapeDtypeStruct((1,), jnp.int32))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == (2 if kernel == "few rows" else 1)


def test_schedules_fit_an_sm():
    for table in (schedules.MANY, schedules.FEW):
        for d, schedule in table.items():
            assert schedule.shared_bytes(d) <= schedules.SHARED_BYTES, (d, schedule)
    for n in schedules.CONSUMER_REGISTERS:
        assert 128 * (n * schedules.CONSUMER_REGISTERS[n] + schedules.PRODUCER_REGISTERS[n]) <= 65536


def test_the_contract_names_what_reaches_the_bits():
    entry = hopper.entry(4, 8, 128, jnp.dtype("bfloat16"))
    assert entry == hopper.entry(8, 2, 128, jnp.dtype("bfloat16"))  # groups and heads reach no row
    assert entry["split"] == SPLIT
    assert float.fromhex(entry["scale"]) == np.float32(reference.softmax_scale(128))
    assert json.dumps(entry) != json.dumps(hopper.entry(4, 8, 64, jnp.dtype("bfloat16")))
    for d, block in ((64, 128), (128, 128), (256, 64)):
        assert hopper.entry(4, 8, d, jnp.dtype("bfloat16"))["block"] == kv_block(d) == block


def test_the_op_reads_a_layer_of_a_stack():
    q, k, v, *where = operands(4, 4, 16, Shape(8, 2, 128, 16), layers=5)
    run = lambda *a: op.attention(*a[:-1], layer=a[-1], region="r", impl="hopper")  # noqa: E731
    assert "mosaic_gpu_v2" in lower(run, q, k, v, *where, jax.ShapeDtypeStruct((), jnp.int32))


@pytest.mark.parametrize("T, S", [(4, 4), (8192, 2)])
def test_layers_that_share_their_work_compute_no_lists(T, S):
    q, k, v, *where = operands(T, S, 640, Shape(8, 2, 128, 16))
    attend = functools.partial(op.attention, region="r", impl="hopper")
    listed = functools.partial(op.work_list, impl="hopper")
    work = jax.eval_shape(listed, q, k, *where)
    assert "stablehlo.reduce" in lower(attend, q, k, v, *where)
    assert "stablehlo.reduce" not in lower(lambda *a: attend(*a[:-1], work=a[-1]), q, k, v, *where, work)
    # Lists of the kernel of many rows cannot be shortened: each forward makes its own.
    growing = jax.eval_shape(lambda *where: listed(q, k, *where, shortest_S=where[1]), *where)
    assert (growing is None) == (T > S) and growing in (None, work)
    assert jax.eval_shape(lambda w, *n: op.shortened(w, q, k, *n, impl="hopper"), growing, where[1], where[1]) == growing


def test_what_it_cannot_serve_is_refused():
    for dtype, d, G, page, why in (
        ("float32", 128, 4, 16, "bfloat16"),
        ("bfloat16", 96, 4, 16, "head_dim"),
        ("bfloat16", 128, 17, 16, "query heads"),
        ("bfloat16", 128, 4, 4, "pages"),
    ):
        paged = jnp.zeros((3, page, 1, d), dtype)
        where = jnp.array([0, 1]), jnp.array([1]), jnp.zeros((1, BLOCK // page), jnp.int32)
        q = jnp.zeros((1, G, d), dtype)
        with pytest.raises(registry.Unsupported, match=why):
            op.attention(q, paged, paged, *where, region="r", impl="hopper")
        assert op.work_list(q, paged, *where, impl="hopper") is None


def test_the_kernel_is_chosen_by_sizes_alone():
    shape = Shape(32, 8, 128, 16)
    assert hopper.few_rows(256, 256, shape)  # decode
    assert hopper.few_rows(64, 1, shape)  # a chunk that many-row tiles would leave most of the GPU idle for
    assert not hopper.few_rows(8192, 1, shape)
    assert not hopper.few_rows(4096, 256, shape)


def sequences(seed: int):
    """(q_start, kv_len, T) of sequences with and without tokens, around block and split edges, and padding after them."""
    rng = np.random.default_rng(seed)
    q_len = np.array([1, 0, 40, 17, 1, 130, 0])
    kv_len = q_len + rng.choice([0, 1, BLOCK - 1, BLOCK, SPLIT - 1, SPLIT, 5000], len(q_len)) * (q_len > 0)
    return np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32), kv_len.astype(np.int32), int(q_len.sum()) + 21


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tokens, block", [(16, 128), (42, 64)])
def test_tiles_cover_every_row_once_and_no_two_sequences(seed, tokens, block):
    q_start, kv_len, T = sequences(seed)
    of = jax.jit(hopper_tiles.tiles, static_argnums=(2, 3, 4))
    table, count = map(np.asarray, of(q_start, kv_len, T, tokens, block))
    S, covered = len(kv_len), []
    for s, token, n, position, blocks in table[:count]:
        covered += range(token, token + n)
        assert 0 < n <= tokens
        if s == S:
            assert token >= q_start[-1] and blocks == 0
            continue
        assert q_start[s] <= token and token + n <= q_start[s + 1]
        assert position == kv_len[s] - (q_start[s + 1] - token)
        assert blocks == -(-(position + n) // block)
    assert covered == list(range(T))
    assert not table[count:, 2].any()


@pytest.mark.parametrize("seed, block", [(0, 128), (1, 64)])
def test_items_are_every_split_of_every_tile_the_largest_first(seed, block):
    q_start, kv_len, T = sequences(seed)
    splits = -(-int(kv_len.max()) // SPLIT)
    per = SPLIT // block
    table, count = hopper_tiles.tiles(jnp.asarray(q_start), jnp.asarray(kv_len), T, 16, block)
    blocks = np.asarray(table)[:, 4]
    listed = jax.jit(hopper_decode.items, static_argnums=(1, 2))
    some = np.random.default_rng(seed).integers(0, np.maximum(blocks, 1))
    for begin in (0 * blocks, some, np.minimum(blocks // 2, per)):
        found, items = map(np.asarray, listed(table, splits, per, jnp.asarray(begin)))
        want = [
            (*tile, max(first, start), min(first + per, tile[4]))
            for tile, start in zip(np.asarray(table)[: int(count)].tolist(), begin.tolist(), strict=False)
            for first in range(start // per * per, max(tile[4], 1), per)
        ]
        got = [tuple(row) for row in found[:items].tolist()]
        assert sorted(got) == sorted(want) and len(set(got)) == len(got)
        if not begin.any():
            sizes = [row[6] - row[5] for row in got]
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("seed, block", [(0, 128), (1, 64)])
def test_a_shortened_list_has_the_items_of_one_made_for_the_shorter_lengths(seed, block):
    """Splits begin and end on the way; what else is listed has no blocks, and belongs to a split that has not begun."""
    q_start, shortest, T = sequences(seed)
    shape, rng = Shape(4, 1, 64, 64, block), np.random.default_rng(seed)
    grows = np.where(shortest > 0, rng.choice([0, 1, block, SPLIT], len(shortest)), 0).astype(np.int32)
    grows[2] = SPLIT
    pages = jnp.zeros((len(shortest), -(-(shortest + grows).max() // BLOCK) * BLOCK // shape.page), jnp.int32)
    listed = jax.jit(lambda lengths: hopper_decode.work_list(jnp.asarray(q_start), lengths, pages, T, shape))
    cut = jax.jit(functools.partial(hopper_decode.shortened, shape=shape))
    longest, unbegun = shortest + grows, 0
    for part in (0, 0.3, rng.random(len(grows)), 0.999, 1):
        lengths = shortest + (grows * part).astype(np.int32)
        (want,), (many,), *merges = map(np.asarray, listed(lengths))
        (got,), (listed_count,), *cut_merges = map(np.asarray, cut(listed(longest), longest, lengths))
        walked = [row for row in got[:listed_count].tolist() if row[6] > row[5] or row[5] == 0]
        assert sorted(walked) == sorted(want[:many].tolist())
        unbegun += listed_count - len(walked)
        assert all(np.array_equal(x, y) for x, y in zip(merges, cut_merges, strict=True))
    assert unbegun > 0


@pytest.mark.parametrize("items", [0, 1, 5, 6, 7, 40])
def test_items_are_dealt_once_and_evenly(items):
    hands = []
    for worker in range(6):
        deal = Deal(jnp.int32(worker), 6, jnp.int32(items))
        hands.append([int(deal[jnp.int32(i)]) for i in range(int(deal.count()))])
    assert sorted(sum(hands, [])) == list(range(items))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    if items == 40:  # dealt round and round, the first worker would have 6 more than the last in each of 6 rounds: 30
        totals = [sum(hand[:6]) for hand in hands]
        assert max(totals) == min(totals)


def merged(o, m, l):  # noqa: E741
    """Splits (axis 0) merged in order, in fp32; then O * (1 / sum) and the log-sum-exp."""
    total_m, total_l, total_o = m[0], l[0], o[0]
    for i in range(1, len(m)):
        some = l[i] > 0
        new = np.where(some, np.maximum(total_m, m[i]), total_m)
        a, b = (np.exp2(x - new).astype(np.float32) for x in (total_m, m[i]))
        first = total_l == 0
        pick = lambda x, y, a, b, some, first: np.where(some, np.where(first, y, x * a + y * b), x)  # noqa: E731
        total_o = pick(total_o, o[i], a[..., None], b[..., None], some[..., None], first[..., None])
        total_l = pick(total_l, l[i], a, b, some, first)
        total_m = new
    inverse = np.where(total_l > 0, np.float32(1) / np.where(total_l > 0, total_l, 1), 0).astype(np.float32)
    return np.asarray((total_o * inverse[..., None]), jnp.bfloat16), total_m + np.log2(
        np.where(total_l > 0, total_l, 1)
    )


@pytest.mark.parametrize("K, G", [(1, 3), (9, 8)])  # all heads in one tile, and in two
def test_splits_are_merged_in_order_in_the_interpreter(K, G):
    rng = np.random.default_rng(0)
    d, splits = 64, 6
    q_start, kv_len = np.array([0, 1, 3, 4], np.int32), np.array([5 * SPLIT + 7, SPLIT + 1, 100], np.int32)
    T, H = 5, K * G  # row 4 is padding
    last_T = np.array([5, 0, 1, 0, -1])
    m = rng.integers(-5, 6, (splits, T, H)).astype(np.float32)
    l = rng.uniform(1, 2, (splits, T, H)).astype(np.float32)  # noqa: E741
    o = (rng.standard_normal((splits, T, H, d)) * 2.0 ** rng.integers(-6, 6, (splits, T, H, d))).astype(np.float32)
    # Of the first row, two splits are far larger than the rest and cancel: another order gives another sum.
    m[:, 0], o[1, 0] = 0, o[1, 0] * 2**16
    o[2, 0] = -o[1, 0]
    m[3, 0], l[3, 0], o[3, 0] = reference.NEVER, 0, 0  # a part without a key
    unused = np.arange(splits)[:, None] > last_T[None]
    for x in (m, l, o):
        x[unused] = np.nan  # of a split that a row sees nothing of, nothing may be written
    parts = np.moveaxis(o.reshape(splits * T, H, d // 32, 32), 2, 0), m.reshape(-1, H), l.reshape(-1, H)
    shape = Shape(H, K, d, 16)
    lengths = jnp.asarray(q_start), jnp.asarray(kv_len)
    pages = jnp.zeros((len(kv_len), splits * SPLIT // shape.page), jnp.int32)
    *_, table, count = hopper_decode.work_list(*lengths, pages, T, shape)
    with mosaic.interpreted():
        got, lse = jax.jit(lambda *a: hopper_decode.merge_splits(*a, shape, T))(*map(jnp.asarray, parts), table, count)
    assert not gpu_callbacks.get_races().races_found
    for x in (m, l, o):
        x[unused] = 0
    want, want_lse = merged(o, m, l)
    assert np.array_equal(bits(got)[:4], bits(want)[:4])
    np.testing.assert_allclose(np.asarray(lse)[:4], want_lse[:4], rtol=1e-6, atol=1e-6)
    assert not np.asarray(got, np.float32)[4].any() and not np.asarray(lse)[4].any()
    other = merged(o[::-1], m[::-1], l[::-1])[0]
    assert not np.array_equal(bits(other)[0], bits(want)[0])  # the order of splits is seen


SHORT_SPLIT = 128


def paged(shape: Shape, q_len, kv_len, padding: int):
    """Operands of the op: the newest q_len tokens of sequences, whose unwritten positions and padding rows are NaN."""
    rng = np.random.default_rng(0)
    need = -(-np.asarray(kv_len) // shape.page)
    pages = rng.permutation(need.sum() + 3)
    k, v = (np.full((len(pages), shape.page, shape.K, shape.d), np.nan, np.float32) for _ in range(2))
    tables = np.zeros((len(need), BLOCK // shape.page * -(-max(kv_len) // BLOCK)), np.int32)
    for s, n in enumerate(kv_len):
        own = pages[need[:s].sum() :][: need[s]]
        tables[s, : need[s]] = own
        at = np.arange(n)
        for x in (k, v):
            x[own[at // shape.page], at % shape.page] = rng.standard_normal((n, shape.K, shape.d))
    q = 2 * rng.standard_normal((sum(q_len) + padding, shape.H, shape.d))
    q[sum(q_len) :] = np.nan
    where = np.cumsum([0, *q_len]), kv_len, tables
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), *(jnp.asarray(x, jnp.int32) for x in where)


@pytest.mark.parametrize("block, page", [(128, 32), (64, 128)])
def test_kernels_in_the_interpreter_agree_in_bits_without_a_race(block, page, monkeypatch):
    """Splits of 128 positions and few programs, so that small sequences have several of each; pages within a block, and of
    several blocks."""
    monkeypatch.setattr(mosaic, "SMS", 2)
    shape = Shape(4, 1, 64, page, block, SHORT_SPLIT)
    q, k, v, *where = paged(shape, (20, 5, 1), (300, 5, 128), padding=2)
    flat = (x.reshape(-1, shape.d) for x in (k, v))
    operands = (q, *flat, *where, jnp.zeros((1,), jnp.int32))
    results = {}
    for name, kernel, schedule in (
        ("many", hopper_forward, schedules.Many(2, 3, overlap=True, park_in_shared=True)),
        ("few", hopper_decode, schedules.Few(2, 2, overlap=False)),
    ):
        with mosaic.interpreted():
            run = functools.partial(kernel.attention, shape=shape, schedule=schedule)
            results[name] = [np.asarray(x) for x in jax.jit(run)(*operands)]
        assert not gpu_callbacks.get_races().races_found, name
    o, lse = results["many"]
    for name, (other_o, other_lse) in results.items():
        assert np.array_equal(bits(o), bits(other_o)) and np.array_equal(bits(lse), bits(other_lse)), name
    want, want_lse = reference.attention(q, k, v, *where, None)
    assert relative(o, want) < 5e-3
    np.testing.assert_allclose(lse, want_lse, atol=1e-2)
    assert not np.asarray(o[26:], np.float32).any() and not lse[26:].any()
