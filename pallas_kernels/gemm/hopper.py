"""GEMM on Hopper tensor cores: which kernel serves a shape. The bits are one function of a row and a weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.gemm import hopper_large, hopper_small, schedules

VERSION = 1
LOAD_ROWS = 8
"""TMA moves tiles of 8 rows: more rows than that come in multiples."""


def entry(N: int, K: int, leaves: int, parallel: str, dtype, out_dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits. No tile does."""
    del N, K, parallel
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "operands": str(dtype),
        "accumulate": "float32",
        "instruction": "wgmma, K in order",
        "order": "chain" if leaves == 1 else f"tree({leaves})",
        "leaves": leaves,
        "round": str(out_dtype),
    }


def gemm(
    x_TK: jax.Array,
    value: jax.Array,
    layer: jax.Array | None,
    leaves: int,
    parallel: str,
    out_dtype,
    padded_N: int | None = None,
    fill: float = -jnp.inf,
) -> jax.Array:
    """y [T, N] = x [T, K] times w^T, w [N, K] or layer `layer` of [L, N, K], which the kernel indexes itself.

    Args:
      x_TK, value: bf16. Any T; K a multiple of 64 leaves; N a multiple of 8.
      layer: int32 scalar, or None.
      leaves: chains that K is cut into; 1 is one chain.
      parallel: not used: no sharding reaches the bits.
      out_dtype: bf16 or fp32.
      padded_N: width of the result; columns N.. are `fill`.

    Raises:
      registry.Unsupported: other dtypes or shapes.
    """
    del parallel
    T, K = x_TK.shape
    N = value.shape[-2]
    width = padded_N or N
    out_dtype = jnp.dtype(out_dtype)
    if x_TK.dtype != jnp.bfloat16 or value.dtype != jnp.bfloat16:
        raise registry.Unsupported(f"Hopper GEMM multiplies bfloat16, got {x_TK.dtype} and {value.dtype}; {registry.USE_BF16}")
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise registry.Unsupported(f"Hopper GEMM rounds to bfloat16 or float32, not {out_dtype}: ask for one of them as out_dtype")
    if K % (hopper_large.STEP * leaves) or N % 8 or width % 8:
        raise registry.Unsupported(
            f"Hopper GEMM needs K in {leaves} leaves of a multiple of {hopper_large.STEP} and N a multiple of 8, got K={K}, N={N}; {registry.USE_CPU}"
        )
    extra = -T % LOAD_ROWS if T > LOAD_ROWS else 0
    x_PK = jnp.pad(x_TK, ((0, extra), (0, 0))) if extra else x_TK
    if schedules.is_few(T, width, leaves):
        y_PN = hopper_small.small_gemm(x_PK, value, layer, leaves, out_dtype, columns=width, fill=fill)
    else:
        schedule = schedules.large(T, width, K, leaves)
        epilogue = hopper_large.store(T + extra, N, out_dtype, schedule, width, fill)
        (y_PN,) = hopper_large.matmul(x_PK, value, layer, leaves, width, epilogue, schedule)
    return y_PN[:T] if extra else y_PN
