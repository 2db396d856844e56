"""How half a head of a row lies in the warps, forward and backward."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import registry


def row_layout(h: int, vector: int = 8):
    """Of [n tile_rows, h], half the columns of a head of each row: a lane holds `vector` neighbouring columns."""
    rows = tile_rows(h, vector)
    if rows == 4:
        tiling = plgpu.Tiling(((rows, h), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((rows, h), (rows // 4, h), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def tile_rows(h: int, vector: int = 8) -> int:
    """Rows of `h` columns that 128 threads hold, `vector` columns to a thread.

    Raises:
      registry.Unsupported: no such layout.
    """
    if h not in (16, 32, 64, 128):
        raise registry.Unsupported(f"qk_norm_rope: the Hopper kernel takes head_dim 32, 64, 128 or 256, not {2 * h}; {registry.USE_CPU}")
    return 128 * vector // h
