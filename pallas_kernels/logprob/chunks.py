"""Training walks its tokens in chunks: logits of one chunk exist at one time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
"""Rows whose logits exist at one time in training."""


def cut(x_TD, targets_T, inv_temp_T, *more_T, rows: int = CHUNK):
    """Arrays [T, ...] cut in chunks [n, rows, ...], padded with zero rows of inverse temperature 1: a padding row's
    logits are then finite, and its gradient is zero and not zero times NaN."""
    T = x_TD.shape[0]
    n = -(-T // rows)

    def pieces(x, fill=0):
        widths = ((0, n * rows - T),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=fill).reshape(n, rows, *x.shape[1:])

    return pieces(x_TD), pieces(targets_T), pieces(inv_temp_T, 1), *map(pieces, more_T)


def by_chunk(fn, x_TD, targets_T, inv_temp_T, rows: int = CHUNK):
    """fn(x_CD, targets_C, inv_temp_C), a tree of [C, ...], over all rows."""
    out = lax.map(lambda a: fn(*a), cut(x_TD, targets_T, inv_temp_T, rows=rows))
    return jax.tree.map(lambda o: o.reshape(-1, *o.shape[2:])[: x_TD.shape[0]], out)
