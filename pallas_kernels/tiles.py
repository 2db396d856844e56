"""Loops over fixed-shape tiles, closed to the compiler: how the reference backend keeps a row's bits its own.

A loop body is a computation of its own to XLA: nothing is fused into it or out of it, and its shapes do not depend on
how many rows a call has. With a trip count that the compiler cannot see, a loop of one trip is not unrolled either, so
one row and a thousand rows run the same machine code. Arrays are padded to two tiles at least: a slice that is the
whole array would be dropped, and with it the loop's dependence on its index, and XLA would hoist the body out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 16
"""Rows of a tile of the elementwise and row-reduction ops: one 512-bit vector of per-row fp32 scalars."""


def opaque(n: int) -> jax.Array:
    """int32 scalar `n` that the compiler cannot read as a constant."""
    return lax.optimization_barrier(jnp.int32(n))


def tile_count(T: int, rows: int) -> int:
    """Tiles of `rows` rows that hold T rows."""
    return -(-T // rows)


def pad_rows(x_T: jax.Array, rows: int) -> jax.Array:
    """Zero rows added to make whole tiles of `rows` rows, two at least."""
    extra = max(2, tile_count(x_T.shape[0], rows)) * rows - x_T.shape[0]
    return jnp.pad(x_T, ((0, extra),) + ((0, 0),) * (x_T.ndim - 1)) if extra else x_T


def tile_of(x_T: jax.Array, i: jax.Array, rows: int) -> jax.Array:
    """Tile `i` of `rows` rows."""
    return lax.dynamic_slice_in_dim(x_T, i * rows, rows)


def map_rows(fn: Callable[..., tuple[jax.Array, ...]], arrays: tuple[jax.Array, ...], rows: int = ROWS):
    """Runs `fn` on tiles of `rows` rows of each array, and joins the tiles of each result.

    Args:
      fn: takes one [rows, ...] tile of each array, returns a tuple of [rows, ...] tiles.
      arrays: arrays [T, ...] of one T; padded with zero rows to whole tiles (fn sees them; results for them are cut).

    Returns:
      A tuple of [T, ...] arrays.
    """
    T = arrays[0].shape[0]
    padded = tuple(pad_rows(x, rows) for x in arrays)
    shapes = jax.eval_shape(fn, *(jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in padded))
    out = tuple(jnp.zeros((padded[0].shape[0], *s.shape[1:]), s.dtype) for s in shapes)

    def body(i, out):
        # The barrier keeps the slicing of a tile out of its arithmetic (fused, it is ten times slower where fn splits a tile).
        results = fn(*lax.optimization_barrier(tuple(tile_of(x, i, rows) for x in padded)))
        return tuple(lax.dynamic_update_slice_in_dim(o, r, i * rows, 0) for o, r in zip(out, results, strict=True))

    return tuple(o[:T] for o in lax.fori_loop(0, opaque(tile_count(T, rows)), body, out))


def halving_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis (a power of two) by halving: element i is added to element i + n/2, and so on down.

    Written as elementwise adds, so that the order is this and no compiler's.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"halving_sum needs a power of two, got {n}")
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x[..., 0]


def exp2_int(n: jax.Array) -> jax.Array:
    """2**n for whole-number fp32 `n`, exact for -126 <= n <= 127; 0 below. The bits are assembled, not computed."""
    e = jnp.clip(n, -127.0, 127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(e << 23, jnp.float32)
