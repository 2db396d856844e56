"""How a row of RMSNorm lies in shared memory and in the warps, forward and backward."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import registry

WARP_COLUMNS = 256
"""Columns that a warp takes at a time: 8 to a lane."""


def unit(D: int) -> int:
    """Width of the innermost axis that a row is cut into: a power of two that divides D, so that the copy engine
    fills a row up to whole pieces with zeros.

    Raises:
      registry.Unsupported: the copy engine cannot take such rows.
    """
    u = min(64, D & -D)
    if u < 16 or D // u > 252:
        raise registry.Unsupported(f"rms_norm: the Hopper kernel takes widths that are multiples of 64, not {D}; {registry.USE_CPU}")
    return u


def row_layout(warps: int, u: int):
    """Of [n rows, columns of a piece / u, u]: a lane holds 8 neighbouring columns of its row or rows."""
    if warps == 1:  # row r lies in warp r % 4
        tiling = plgpu.Tiling(((4, WARP_COLUMNS // u, u), (8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((1, 4 * WARP_COLUMNS // u, u), (WARP_COLUMNS // u, u), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
