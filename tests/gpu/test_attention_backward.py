"""The Hopper attention backward on the GPU: gradients against float64, the same bits every run, and nothing from outside a
sequence in them.

How a sequence is packed may reach the bits of dq, dk and dv: tiles of queries begin where TMA lets them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention as op
from pallas_kernels.attention import hopper, hopper_backward
from tests.pallas_kernels.base import bits, relative


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def wide(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def exact(q, k, v, do):
    """(o, log-sum-exp in log2 units, dq, dk, dv) of one sequence's last len(q) rows, float64."""
    n, H, d = q.shape
    N, K, _ = k.shape
    k_H, v_H = (np.repeat(x, H // K, 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k_H) / math.sqrt(d)
    s[:, np.arange(n)[:, None] + N - n < np.arange(N)[None]] = -np.inf
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    p /= total
    dp = np.einsum("qhd,khd->hqk", do, v_H)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    group = lambda x: x.reshape(N, K, H // K, d).sum(2)  # noqa: E731
    dq, dk = np.einsum("hqk,khd->qhd", ds, k_H), group(np.einsum("hqk,qhd->khd", ds, q))
    lse = ((m + np.log(total))[..., 0].T) * math.log2(math.e)
    return np.einsum("hqk,khd->qhd", p, v_H), lse, dq, dk, group(np.einsum("hqk,qhd->khd", p, do))


class Work:
    """Packed sequences on shuffled pages: arguments of the backward, and its exact results. `lengths` are (queries, earlier
    positions); rows past the last sequence and pages' unwritten rows are NaN, table entries past a sequence's are absurd."""

    def __init__(self, lengths, H: int, K: int, d: int, page: int, padding: int = 70, scale: float = 1.0):
        S = len(lengths)
        self.start = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
        self.rows, kv_len = int(self.start[-1]), np.array([sum(n) for n in lengths], np.int32)
        T = self.rows + padding
        count = -(-kv_len // page)
        N = int(count.sum()) + 3
        shuffled = np.random.default_rng(0).permutation(N)
        table = np.full((S, count.max() + 1), 10**6, np.int32)
        q, do = draw(0, T, H, d, scale=scale), draw(1, T, H, d)
        pages = np.full((2, N, page, K, d), np.nan, np.float32)
        o, lse, dq = np.zeros((T, H, d)), np.zeros((T, H)), np.zeros((T, H, d))
        dkv = np.zeros((2, N, page, K, d))
        for s in range(S):
            table[s, : count[s]] = own = shuffled[count[:s].sum() : count[: s + 1].sum()]
            position = np.arange(kv_len[s])
            at = own[position // page], position % page
            kv = [draw(2 + 2 * s + i, kv_len[s], K, d) for i in range(2)]
            for x, value in zip(pages, kv, strict=True):
                x[at] = np.asarray(value, np.float32)
            here = slice(self.start[s], self.start[s + 1])
            if lengths[s][0]:
                o[here], lse[here], dq[here], dk, dv = exact(wide(q[here]), *map(wide, kv), wide(do[here]))
                dkv[0][at], dkv[1][at] = dk, dv
        q = q.at[self.rows :].set(jnp.nan)
        k_pages, v_pages = (jnp.asarray(x, jnp.bfloat16) for x in pages)
        self.inputs = (q, k_pages, v_pages, *map(jnp.asarray, (self.start, kv_len, table)))
        self.o, self.lse, self.do = o, lse, do
        self.args = (*self.inputs, jnp.asarray(o, jnp.bfloat16), jnp.asarray(lse, jnp.float32), do)
        self.want = (dq, *dkv)


backward = jax.jit(hopper_backward.attention_backward)

LENGTHS = ((300, 0), (1, 0), (129, 0), (0, 0), (64, 0), (391, 0))


@pytest.mark.parametrize(
    "d, H, K, page, lengths",
    [
        (128, 8, 2, 128, LENGTHS),
        (128, 3, 3, 16, LENGTHS),
        (128, 4, 2, 64, ((100, 300), (1, 700), (0, 90), (130, 1))),
        (128, 16, 1, 8, LENGTHS),
        (64, 6, 2, 32, LENGTHS),
        (64, 9, 3, 128, ((100, 300), (1, 700), (300, 64))),
        (256, 8, 1, 128, LENGTHS),
        (256, 2, 2, 16, ((100, 300), (1, 200), (300, 64))),
    ],
)
def test_gradients_against_float64(d, H, K, page, lengths):
    """And padding rows, pages of no sequence and unwritten rows get exact zeros."""
    work = Work(lengths, H, K, d, page)
    got = backward(*work.args)
    for name, g, want in zip(("dq", "dk", "dv"), got, work.want, strict=True):
        assert relative(wide(g), want) < 4e-3, name
    dq, *dkv = (np.asarray(g, np.float32) for g in got)
    assert not dq[work.rows :].any()
    written = ~np.isnan(np.asarray(work.inputs[1], np.float32))
    assert not any(x[~written].any() for x in dkv) and (~written).any()


@functools.cache
def many(d: int, H: int, K: int):
    """Two sequences of 8192 rows: as many programs wait for each other as the GPU holds."""
    T = 8192
    inputs = (draw(0, T, H, d), draw(1, T // 128, 128, K, d), draw(2, T // 128, 128, K, d))
    where = jnp.array([0, T - 777, T], jnp.int32), jnp.array([T - 777, 777], jnp.int32)
    table = jnp.stack([jnp.arange(64), jnp.roll(jnp.arange(64), 7)]).astype(jnp.int32)
    o_THd, lse_TH = jax.jit(hopper.attention)(*inputs, *where, table, None)
    return (*inputs, *where, table, o_THd, lse_TH, draw(3, T, H, d))


@pytest.mark.parametrize("d, H, K", [(64, 8, 2), (128, 32, 8), (256, 8, 2)])
def test_every_run_has_the_same_bits(d, H, K):
    args = many(d, H, K)
    first = [bits(x) for x in backward(*args)]
    for _ in range(5):
        for a, b in zip(first, backward(*args), strict=True):
            assert np.array_equal(a, bits(b))


def test_the_order_is_what_keeps_the_bits(monkeypatch):
    """The control: programs that do not wait for their turn."""
    args = many(128, 32, 8)
    monkeypatch.setattr(plgpu, "semaphore_wait", lambda *args, **options: None)
    hasty = jax.jit(lambda *args: hopper_backward.attention_backward(*args)[0])
    runs = [bits(hasty(*args)) for _ in range(10)]
    assert any(not np.array_equal(runs[0], x) for x in runs[1:])


@pytest.mark.parametrize("d, H, K", [(128, 8, 2), (64, 6, 2)])
def test_through_the_op_against_the_reference(d, H, K):
    """jax.vjp of the op itself, against the reference op in fp32 on the same bf16 values."""
    work = Work(LENGTHS, H, K, d, 32)
    q, k_pages, v_pages, *where = work.inputs
    clean = [jnp.nan_to_num(x) for x in (q, k_pages, v_pages)]

    @functools.partial(jax.jit, static_argnums=0)
    def grads(impl, inputs, do):
        run = lambda *x: op.attention(*x, *where, region="r", impl=impl)  # noqa: E731
        return jax.vjp(run, *inputs)[1](do)

    ours = grads("hopper", [q, k_pages, v_pages], work.do)
    reference = grads("reference", [x.astype(jnp.float32) for x in clean], work.do.astype(jnp.float32))
    for g, want in zip(ours, reference, strict=True):
        assert relative(wide(g), wide(want)) < 5e-3


def test_error_is_no_larger_than_cudnns():
    """One sequence, from the exact output: relative error of each gradient against float64, both sides bf16."""
    work = Work(((1024, 0),), 8, 2, 128, 128, padding=0, scale=2.0)
    q, k_pages, v_pages, *_ = work.inputs
    pages = work.inputs[5][0, :8]
    k_TKd, v_TKd = (x[pages].reshape(1024, 2, 128) for x in (k_pages, v_pages))
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    cudnn = jax.jit(lambda *x: jax.vjp(run, *x[:3])[1](x[3]))(q[None], k_TKd[None], v_TKd[None], work.do[None])
    dq, *dkv = backward(*work.args)
    ours = (dq, *(x[pages].reshape(1024, 2, 128) for x in dkv))
    want = (work.want[0], *(x[np.asarray(pages)].reshape(1024, 2, 128) for x in work.want[1:]))
    for name, mine, its, x in zip(("dq", "dk", "dv"), ours, cudnn, want, strict=True):
        assert relative(wide(mine), x) <= 1.02 * relative(wide(its[0]), x), name


def test_native_baseline_trains_through_cudnn():
    work = Work(LENGTHS, 8, 2, 128, 128)
    q, k_pages, v_pages, *where = work.inputs
    inputs = [jnp.nan_to_num(x) for x in (q, k_pages, v_pages)]
    o, pull = jax.vjp(lambda *x: op.attention(*x, *where, region="r", impl="native"), *inputs)
    assert relative(wide(o), work.o) < 5e-3
    for g, want in zip(pull(work.do), work.want, strict=True):
        assert relative(wide(g), want) < 5e-3
