from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isomodel.batch import Rows, make_batch
from pallas_kernels import attention as op
from tests.pallas_kernels.base import ISO, bits, relative

K, G, D = 2, 3, 32
H = K * G


@functools.cache
def sequence(n: int, seed: int, dtype: str = "bfloat16", d: int = D):
    """q [n, H, d], k, v [n, K, d] of one sequence; peaked scores, so that the running maximum moves."""
    rng = np.random.default_rng(seed)
    draw = lambda heads, scale: jnp.asarray(rng.standard_normal((n, heads, d)) * scale, dtype)  # noqa: E731
    return draw(H, 2.0), draw(K, 2.0), draw(K, 1.0)


@functools.partial(jax.jit, static_argnums=0)
def _run(impl, q, k_pages, v_pages, batch):
    where = (batch.q_start_S1, batch.kv_len_S, batch.page_table_SP)
    return op.attention(q, k_pages, v_pages, *where, region="r", impl=impl)


def run(impl, work, page_size=16, num_pages=200, T=None, S=None, seed=0, fill=np.nan):
    """Attention over `work`, a list of (sequence, start, stop): keys up to `stop` are written to random pages, the rest
    of the pages holds `fill`. Returns one [stop - start, H, d] a piece."""
    free = list(np.random.default_rng(seed).permutation(num_pages))
    dtype, d = work[0][0][0].dtype, work[0][0][0].shape[-1]
    k_pages, v_pages = (np.full((num_pages, page_size, K, d), fill, np.float32) for _ in range(2))
    rows, queries = [], []
    for (q, k, v), start, stop in work:
        pages = [int(free.pop()) for _ in range(-(-stop // page_size))]
        at = np.arange(stop)
        for paged, x in ((k_pages, k), (v_pages, v)):
            paged[np.array(pages)[at // page_size], at % page_size] = np.asarray(x[:stop], np.float32)
        rows.append(Rows(np.zeros(stop, np.int32), start, stop, pages))
        queries.append(q[start:stop])
    total = sum(len(q) for q in queries)
    T = T or total
    q = jnp.concatenate([*queries, jnp.full((T - total, H, d), fill, dtype)])
    P = max(len(r.pages) for r in rows)
    batch = make_batch(rows, page_size, T=T, S=S or len(rows), P=P)
    out = _run(impl, q, jnp.asarray(k_pages, dtype), jnp.asarray(v_pages, dtype), batch)
    ends = np.cumsum([len(x) for x in queries])
    assert not np.asarray(out[total:], np.float32).any(), "padding rows are exact zeros"
    return [np.asarray(out[e - len(x) : e]) for e, x in zip(ends, queries, strict=True)]


def exact(q, k, v):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n = len(q)
    k, v = np.repeat(k, G, 1), np.repeat(v, G, 1)
    s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    s[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("impl", [*ISO, "native"])
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 1e-2), ("float32", 1e-5)])
def test_accuracy_against_float64(impl, dtype, tolerance):
    work = sequence(300, 0, dtype)
    (out,) = run(impl, [(work, 0, 300)], fill=0.0 if impl == "native" else np.nan)
    assert relative(out, exact(*work)) < tolerance


def test_both_layouts_of_the_native_baseline_compute_attention():
    """Few pages: all rows over all pages; many: padded sequences."""
    a, b = sequence(200, 8, "float32"), sequence(3, 9, "float32")
    work = [(a, 0, 200), (b, 0, 3)]
    for num_pages in (15, 200):
        for got, x in zip(run("native", work, num_pages=num_pages, T=208, S=3, fill=0.0), (a, b), strict=True):
            assert relative(got, exact(*x)) < 1e-5


@pytest.mark.parametrize("impl", ISO)
def test_every_row_alone_equals_its_row_in_a_causal_forward(impl):
    """Decode against training, around every edge of the tiles of 16 and the blocks of 128, among garbage."""
    work = sequence(300, 1)
    (whole,) = run(impl, [(work, 0, 300)])
    for t in (0, 1, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128, 129, 255, 256, 257, 299):
        (row,) = run(impl, [(work, t, t + 1)], seed=t, T=1, num_pages=25)
        assert np.array_equal(bits(row[0]), bits(whole[t])), f"position {t}"


@pytest.mark.parametrize("impl", ISO)
@pytest.mark.parametrize("page_size", [128, 64, 16])
def test_blocks_of_64_at_a_large_head_dim(impl, page_size):
    """Pages of two blocks, of one, and of less."""
    work = sequence(140, 1, d=136)
    (whole,) = run(impl, [(work, 0, 140)], page_size, 20)
    assert relative(whole, exact(*work)) < 1e-2
    for t in (0, 62, 63, 64, 65, 127, 128, 129, 139):
        (row,) = run(impl, [(work, t, t + 1)], page_size, 25, seed=t, T=1)
        assert np.array_equal(bits(row[0]), bits(whole[t])), f"position {t}"


@pytest.mark.parametrize("impl", ISO)
@pytest.mark.parametrize("split", [128, 256])
def test_split_edges(impl, split, monkeypatch):
    """The same with splits of one and two blocks: decode before an edge has one split less than its training tile."""
    from pallas_kernels.attention import reference

    work = sequence(300, 2, "float32")  # rounding to bf16 would hide the split
    (one_split,) = run(impl, [(work, 0, 300)])
    monkeypatch.setattr(reference, "SPLIT", split)
    _run.clear_cache()
    try:
        (whole,) = run(impl, [(work, 0, 300)])
        for t in (split - 2, split - 1, split, split + 1, 299):
            (row,) = run(impl, [(work, t, t + 1)], seed=t, T=1, num_pages=25)
            assert np.array_equal(bits(row[0]), bits(whole[t])), f"position {t}"
        assert relative(whole, one_split) < 5e-3
        assert not np.array_equal(bits(whole[-20:]), bits(one_split[-20:])), "the split had no effect"
    finally:
        _run.clear_cache()


@pytest.mark.parametrize("impl", ISO)
def test_packing_chunks_page_size_and_garbage_do_not_matter(impl):
    a, b, c = sequence(200, 3), sequence(37, 4), sequence(129, 5)
    alone = [run(impl, [(x, 0, n)])[0] for x, n in ((a, 200), (b, 37), (c, 129))]
    for page_size, order, seed in ((16, (2, 0, 1), 1), (128, (1, 2, 0), 2), (64, (0, 1, 2), 3)):
        pieces = [(a, 90, 200), (b, 0, 37), (c, 128, 129)]
        out = run(impl, [pieces[i] for i in order], page_size, 40, T=160, S=5, seed=seed, fill=1e4)
        for i, piece in zip(order, out, strict=True):
            start, stop = pieces[i][1:]
            assert np.array_equal(bits(piece), bits(alone[i][start:stop]))


@pytest.mark.parametrize("impl", ISO)
def test_duplicate_sequences_give_equal_rows(impl):
    a = sequence(40, 6)
    x, y, z = run(impl, [(a, 0, 40), (sequence(30, 7), 0, 30), (a, 0, 40)])
    assert np.array_equal(bits(x), bits(z)) and not np.array_equal(bits(x[:30]), bits(y))


@pytest.mark.parametrize("impl", ISO)
def test_extreme_scores(impl):
    """Scores far apart, far below zero and far above: no NaN, weights of the largest only."""
    q, k, v = (np.array(x, np.float32) for x in sequence(140, 8, "float32"))
    for scale in (50.0, -50.0, 1e4):
        work = tuple(jnp.asarray(x, jnp.float32) for x in (q * scale, k, v))
        (out,) = run(impl, [(work, 0, 140)])
        assert relative(out, exact(*work)) < 1e-2


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("page_size, d", [(128, D), (32, D), (128, 136)])
def test_gradients_against_autodiff_of_the_plain_op(dtype, tolerance, page_size, d):
    lengths, T = (150, 60), 224
    rng = np.random.default_rng(0)
    pages = [list(range(8 * 128 // page_size))[i * (256 // page_size) : (i + 1) * (256 // page_size)] for i in (0, 1)]
    rows = [Rows(np.zeros(n, np.int32), 0, n, p) for n, p in zip(lengths, pages, strict=True)]
    batch = make_batch(rows, page_size, T=T, S=3, P=256 // page_size)
    total = sum(lengths)
    q = jnp.asarray(rng.standard_normal((T, H, d)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((T, K, d)), dtype) for _ in range(2))
    weights = jnp.asarray(rng.standard_normal((T, H, d)), jnp.float32)
    num_pages = 4 * 128 // page_size

    def loss(impl, q, k, v):
        shape = (num_pages, page_size, K, d)
        paged = [jnp.zeros((num_pages * page_size, K, d), x.dtype).at[batch.slots_T].set(x, mode="drop") for x in (k, v)]
        out = op.attention(
            q, *(x.reshape(shape) for x in paged), batch.q_start_S1, batch.kv_len_S, batch.page_table_SP,
            region="r", impl=impl,
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * weights)

    grad = lambda impl: jax.jit(jax.grad(functools.partial(loss, impl), argnums=(0, 1, 2)))(q, k, v)  # noqa: E731
    plain = grad("native")
    for impl in ISO:
        ours, again = grad(impl), grad(impl)
        for a, b, c in zip(ours, plain, again, strict=True):
            assert np.array_equal(bits(a), bits(c)), "the gradient changes from run to run"
            assert relative(a[:total], b[:total]) < tolerance
            assert not np.asarray(a[total:], np.float32).any(), "padding rows get no gradient"


def test_faults_are_named():
    where = (jnp.zeros(2, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32))
    pages = jnp.zeros((2, 48, K, D))
    with pytest.raises(ValueError, match="page size 48 does not divide"):
        op.attention(jnp.zeros((1, H, D)), pages, pages, *where, region="r", impl="reference")
    pages = jnp.zeros((2, 16, K, D))
    with pytest.raises(ValueError, match="do not fit"):
        op.attention(jnp.zeros((1, H + 1, D)), pages, pages, *where, region="r", impl="reference")
    with pytest.raises(ValueError, match="the pages float32"):
        op.attention(jnp.zeros((1, H, D), jnp.bfloat16), pages, pages, *where, region="r", impl="reference")
