"""Packed sequences on shuffled pages for the attention backward, its exact results in float64, and where two runs differ."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.base import bits, differ


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def wide(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def own_pages(kv_len_S: np.ndarray, page: int) -> tuple[np.ndarray, int]:
    """(page table [S, P], number of pages): shuffled, none of two sequences, as a gradient needs them, and some of nobody;
    entries past a sequence's pages are absurd."""
    count = -(-kv_len_S // page)
    N = int(count.sum()) + 3
    shuffled = np.random.default_rng(0).permutation(N)
    table = np.full((len(kv_len_S), count.max() + 1), 10**6, np.int32)
    for s, n in enumerate(count):
        table[s, :n] = shuffled[count[:s].sum() : count[: s + 1].sum()]
    return table, N


def differences(runs, args) -> list[str]:
    """A line for every array of (dq, dk, dv) of a later run whose bits are not the first run's: how many values, how far
    apart, and where. `args`: what `attention_backward` was given."""
    page = args[1].shape[1]
    start, kv_len, table = map(np.asarray, args[3:6])

    def row(at):
        return f"{at} (sequence {np.searchsorted(start, at, side='right') - 1})"

    def page_of(at):
        owners = [
            f"sequence {s}'s {i}" for s, n in enumerate(-(-kv_len // page)) for i in np.flatnonzero(table[s, :n] == at)
        ]
        return f"{at} ({' and '.join(owners) or 'of nobody'})"

    rest = (("head", str), ("column", str))
    axes = {"dq": (("row", row), *rest)} | dict.fromkeys(("dk", "dv"), (("page", page_of), ("row", str), *rest))

    def some(noun, shown, found):
        return (
            f"{len(found)} {noun}s: {', '.join(map(shown, found[:8]))}{f' ... {found[-1]}' if len(found) > 8 else ''}"
        )

    lines = []
    first = [np.asarray(x) for x in runs[0]]
    for number, run in enumerate(runs[1:], 1):
        for name, a, b in zip(axes, first, map(np.asarray, run), strict=True):
            if differ(a, b):
                at = np.nonzero(bits(a) != bits(b))
                apart = np.abs(a[at].astype(np.float32) - b[at].astype(np.float32)).max()
                where = "; ".join(some(*axis, np.unique(x)) for axis, x in zip(axes[name], at, strict=True))
                lines.append(
                    f"run {number}, {name}: {len(at[0])} of {a.size} values differ, by up to {apart:.3g}; {where}"
                )
    return lines


def exact(q, k, v, do):
    """(o, log-sum-exp in log2 units, dq, dk, dv) of one sequence's last len(q) rows."""
    (n, H, d), (N, K, _) = q.shape, k.shape
    q_H, do_H = (x.transpose(1, 0, 2) for x in (q, do))
    k_H, v_H = (np.repeat(x, H // K, 1).transpose(1, 0, 2) for x in (k, v))
    turned = lambda x: x.transpose(0, 2, 1)  # noqa: E731
    s = q_H @ turned(k_H) / math.sqrt(d)
    s[:, np.arange(n)[:, None] + N - n < np.arange(N)[None]] = -np.inf
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    p /= total
    dp = do_H @ turned(v_H)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(d)
    rows = lambda x: x.transpose(1, 0, 2)  # noqa: E731
    group = lambda x: rows(x).reshape(N, K, H // K, d).sum(2)  # noqa: E731
    lse = ((m + np.log(total))[..., 0].T) * math.log2(math.e)
    return rows(p @ v_H), lse, rows(ds @ k_H), group(turned(ds) @ q_H), group(turned(p) @ do_H)


class Work:
    """Arguments of `attention_backward` (`args`) and its exact results (`want`). `lengths` are (queries, positions before
    them); rows past the last sequence and unwritten rows of pages are NaN, table entries past a sequence's are absurd."""

    def __init__(self, lengths, H: int, K: int, d: int, page: int, padding: int = 70, scale: float = 1.0):
        S = len(lengths)
        self.start = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
        self.rows, kv_len = int(self.start[-1]), np.array([sum(n) for n in lengths], np.int32)
        T = self.rows + padding
        table, N = own_pages(kv_len, page)
        q, self.do = draw(0, T, H, d, scale=scale), draw(1, T, H, d)
        pages = np.full((2, N, page, K, d), np.nan, np.float32)
        self.o, lse, dq = np.zeros((T, H, d)), np.zeros((T, H)), np.zeros((T, H, d))
        dkv = np.zeros((2, N, page, K, d))
        for s in range(S):
            position = np.arange(kv_len[s])
            at = table[s, position // page], position % page
            kv = [draw(2 + 2 * s + i, kv_len[s], K, d) for i in range(2)]
            for x, value in zip(pages, kv, strict=True):
                x[at] = np.asarray(value, np.float32)
            here = slice(self.start[s], self.start[s + 1])
            if lengths[s][0]:
                found = exact(wide(q[here]), *map(wide, kv), wide(self.do[here]))
                self.o[here], lse[here], dq[here], dkv[0][at], dkv[1][at] = found
        q = q.at[self.rows :].set(jnp.nan)
        k_pages, v_pages = (jnp.asarray(x, jnp.bfloat16) for x in pages)
        self.inputs = (q, k_pages, v_pages, *map(jnp.asarray, (self.start, kv_len, table)))
        self.args = (*self.inputs, jnp.asarray(self.o, jnp.bfloat16), jnp.asarray(lse, jnp.float32), self.do)
        self.want = (dq, *dkv)

    def exact_zeros(self, grads) -> bool:
        """Whether padding rows, pages of no sequence and unwritten rows of pages have zeros."""
        dq, *dkv = (np.asarray(g, np.float32) for g in grads)
        nowhere = np.isnan(np.asarray(self.inputs[1], np.float32))
        assert nowhere.any()
        return not dq[self.rows :].any() and not any(x[nowhere].any() for x in dkv)
