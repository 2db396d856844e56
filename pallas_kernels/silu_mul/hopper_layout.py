"""How a warpgroup holds a tile of gates or ups."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu

COLUMNS = 256
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, COLUMNS), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""Of [4 n rows, COLUMNS]: a lane holds 8 neighbouring columns."""
