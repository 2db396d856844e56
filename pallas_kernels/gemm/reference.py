"""GEMM in plain JAX: every dot of one fixed shape, so that on a CPU a row's bits depend on the row alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiles import opaque, pad_rows, tile_count, tile_of

VERSION = 1
TILE_M = 64
COLUMN_SHARDS = 8
MAX_TILE_N = {"column": 512, "row": 1024}


def tile_n(N: int, parallel: str) -> int:
    """Columns of a dot. A column-parallel one divides an eighth of N, so that 1, 2, 4 or 8 ranks call the same dots."""
    per_shard = N // COLUMN_SHARDS if parallel == "column" and N % COLUMN_SHARDS == 0 else N
    return next(n for n in range(min(per_shard, MAX_TILE_N[parallel]), 0, -1) if per_shard % n == 0)


def entry(N: int, K: int, leaves: int, parallel: str, dtype, out_dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits."""
    return {
        "implementation": "reference",
        "version": VERSION,
        "arch": "cpu",
        "operands": str(dtype),
        "accumulate": "float32",
        "order": "chain" if leaves == 1 else f"tree({leaves})",
        "leaves": leaves,
        "dot": [TILE_M, tile_n(N, parallel), K // leaves],
        "round": str(out_dtype),
    }


def dot_tile(x_MK: jax.Array, w_NK: jax.Array, leaves: int) -> jax.Array:
    """One tile in fp32: `leaves` dots over contiguous parts of K, added in a balanced tree."""
    size = x_MK.shape[1] // leaves
    parts = [
        lax.dot_general(
            x_MK[:, i * size : (i + 1) * size],
            w_NK[:, i * size : (i + 1) * size],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        for i in range(leaves)
    ]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def gemm(x_TK, value, layer, leaves: int, parallel: str, out_dtype, padded_N: int | None = None) -> jax.Array:
    """y [T, N] = x [T, K] times w^T, w [N, K] or layer `layer` of [L, N, K].

    With `padded_N`, tiles are those of a weight with zero rows up to padded_N, and so is the result.
    """
    T, K = x_TK.shape
    N = value.shape[-2]
    width = tile_n(padded_N or N, parallel)
    x_PK = pad_rows(x_TK, TILE_M)

    def multiply(n, w_nK, y_PN):
        def rows(m, y_PN):
            y_mn = dot_tile(tile_of(x_PK, m, TILE_M), w_nK, leaves).astype(out_dtype)
            return lax.dynamic_update_slice(y_PN, y_mn, (m * TILE_M, n * width))

        return lax.fori_loop(0, opaque(tile_count(T, TILE_M)), rows, y_PN)

    def columns(n, y_PN):
        # A tile of weights is read once and stays in cache for all rows.
        if layer is None:
            w_nK = lax.dynamic_slice(value, (n * width, 0), (width, K))
        else:
            w_nK = lax.dynamic_slice(value, (layer, n * width, 0), (1, width, K))[0]
        return multiply(n, w_nK, y_PN)

    whole, rest = divmod(N, width)
    y_PN = jnp.zeros((x_PK.shape[0], padded_N or N), out_dtype)
    if whole:
        y_PN = lax.fori_loop(0, opaque(whole), columns, y_PN)
    if rest:
        y_PN = multiply(whole, jnp.pad(value[N - rest :], ((0, width - rest), (0, 0))), y_PN)
    return y_PN[:T]
