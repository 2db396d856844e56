"""What the tests of the Hopper log-probability share: kinds of logits, float64's answer, and the entry's arithmetic in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.logprob import EIGHTHS, hopper_blocks, hopper_combine

f32 = np.float32
UNIT = f32(np.log(2.0))
"""The inverse temperature whose scale is 1: whole logits are whole exponents, whose powers any implementation has exactly."""

LOGITS = {
    "as a model's": lambda key, shape: jax.random.normal(key, shape) * 3,
    "wide": lambda key, shape: jax.random.normal(key, shape) * 40,
    "far from 0": lambda key, shape: jax.random.normal(key, shape) * 3 + 200,
    "far below 0": lambda key, shape: jax.random.normal(key, shape) * 3 - 1e4,
    "all equal": lambda key, shape: jnp.full(shape, 7.3),
    "one hot": lambda key, shape: jax.random.normal(key, shape).at[:, 3].add(60.0),
    "sharp": lambda key, shape: jax.random.normal(key, shape).at[:, 3].add(18.0),
    "two values": lambda key, shape: jnp.where(jax.random.bernoulli(key, 0.5, shape), 1e4, -1e4),
}


def exact(z, targets, inv_temp) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, log-sum-exp) in float64."""
    s = np.asarray(z, np.float64) * np.asarray(inv_temp, np.float64)[:, None]
    top = s.max(1, keepdims=True)
    lse = np.log(np.exp(s - top).sum(1)) + top[:, 0]
    return s[np.arange(len(s)), targets] - lse, lse


@jax.jit
def library(z, targets, inv_temp):
    return jnp.take_along_axis(jax.nn.log_softmax(z * inv_temp[:, None], axis=1), targets[:, None], axis=1)[:, 0]


def powers() -> np.ndarray:
    """fp32 [64, 128]: exponents of 2 whose powers lose some of their bits where they are added."""
    exponents = np.random.default_rng(0).choice([0, -1, -19, -20, -21, -22], (64, 128))
    exponents[:, 5] = 0
    return exponents.astype(f32)


def plant(z, targets, lp) -> tuple[int, np.ndarray]:
    """(row, z) with the logit of one row's target one ulp up: 2^-20, a quarter of which is more than any rounding of a
    log-probability between -4 and -ln 2."""
    z, at = np.array(z), (np.arange(len(z)), np.asarray(targets))
    row = int(np.flatnonzero((z[at] >= 8) & (lp > -4) & (lp < -np.log(2)))[0])
    z[row, targets[row]] = np.nextafter(z[row, targets[row]], f32(np.inf))
    return row, z


def error(got, want) -> float:
    """Root mean square of the difference, in float64."""
    return float(np.sqrt(np.mean((np.asarray(got, np.float64) - np.asarray(want, np.float64)) ** 2)))


def rounding(want: np.ndarray) -> float:
    """Half an ulp of the results, and of the logarithm of a sum near 1."""
    return error(np.spacing(np.abs(want).astype(f32)), 0) / 2 + 2.0**-22


def fma(x, y, z) -> np.ndarray:
    """A product of two fp32 numbers is exact in float64; the sum is rounded there first, which one in 2^28 tells."""
    return (np.asarray(x, np.float64) * np.asarray(y, np.float64) + np.asarray(z, np.float64)).astype(f32)


def counts(terms_MV: np.ndarray) -> np.ndarray:
    """A block's sum, in units of 2^-23, from its terms fp32 [rows, 128]."""
    while terms_MV.shape[1] > hopper_blocks.COLUMNS:
        half = terms_MV.shape[1] // 2
        terms_MV = terms_MV[:, :half] + terms_MV[:, half:]
    return np.rint(terms_MV * f32(2.0**hopper_blocks.FIXED_POINT_BITS)).astype(np.int32).sum(1, dtype=np.int32)


def _tree(terms, add):
    while len(terms) > 1:
        terms = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _scaled(total, top):
    return np.ldexp(total[1], np.maximum(total[0] - top, -300).astype(int))


def _added(totals, add):
    top = functools.reduce(np.maximum, [top for top, _ in totals])
    return top, add([_scaled(total, top) for total in totals])


def _total(max_nB, sum_nB):
    """(M, sum) of all blocks."""
    size = hopper_combine.GROUP
    plain = lambda parts: _tree(parts, np.add)  # noqa: E731
    first = lambda parts: parts[0] + plain(parts[1:])  # noqa: E731
    nothing = np.full_like(max_nB[0], hopper_blocks.FLOOR), np.zeros_like(sum_nB[0])
    eighths = []
    for blocks in np.split(np.arange(len(max_nB)), EIGHTHS):
        total = nothing
        for i in range(0, len(blocks), size):
            group = [(max_nB[n], sum_nB[n]) for n in blocks[i : i + size]]
            total = _added([total, *group, *[nothing] * (size - len(group))], first)
        eighths.append(total)
    return _tree(eighths, lambda a, b: _added([a, b], plain))


def _two_sum(x, y):
    total = x + y
    y_in = total - x
    return total, (x - (total - y_in)) + (y - y_in)


def combined(max_nB, count_nB, target_B, inv_temp_B) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, log-sum-exp) from block sums: the result that the entry names."""
    c = hopper_combine
    top, total = _total(np.asarray(max_nB), np.asarray(count_nB).astype(f32))
    m, k = np.frexp(total * f32(2.0**-hopper_blocks.FIXED_POINT_BITS))
    low = m * 2 < f32(4 / 3)
    f, k = np.where(low, 2 * m, m).astype(f32) - f32(1), np.where(low, k - 1, k).astype(f32)
    series = np.full_like(f, c.LOG1P[-1])
    for coefficient in c.LOG1P[-2::-1]:
        series = fma(series, f, f32(coefficient))
    rest = fma(f * f, series, f)
    target, inv_temp = np.asarray(target_B), np.asarray(inv_temp_B)
    scale = inv_temp * f32(hopper_blocks.LOG2E)
    low = fma(-scale, f32(c.LN2), inv_temp) / scale
    rest = fma(-k, low - f32(c.LN2_LOW), rest)
    exponent, top = target * scale, top + k
    d, lost = _two_sum(exponent, -top)
    lost = lost + fma(target, scale, -exponent)
    lp = fma(d, f32(c.LN2), fma(d, low, fma(lost, f32(c.LN2), -rest)))
    return np.minimum(lp, f32(0)), fma(top, f32(c.LN2), fma(top, low, rest))


def offers(shares: int, B: int, P: int, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A Choice of rows with ties between shares (scores, indices, logits), and what is to be chosen: the lowest of the best."""
    rng = np.random.default_rng(shares)
    scores = rng.integers(0, max(2, shares // 8), (shares, P)).astype(np.float32)
    scores[:, 1], scores[:, 2] = -np.inf, -0.0
    scores[shares // 2, 2] = 0.0
    indices = rng.permuted(np.broadcast_to(rng.permutation(V)[:shares, None], (shares, P)), axis=0).astype(np.int32)
    best = np.where(scores == scores.max(0), indices, V).min(0)
    assert (np.sum(scores == scores.max(0), axis=0) > 1).any() and (best != indices[scores.argmax(0), np.arange(P)]).any()
    return scores, indices, rng.standard_normal((B, V)).astype(np.float32), best[:B]
