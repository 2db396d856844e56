"""The arithmetic of silu(gate) * up on Hopper, one for every kernel that does it."""

from __future__ import annotations

import math

import jax

from pallas_kernels import mosaic, row_stream


def product(gate: jax.Array, up: jax.Array, layout) -> jax.Array:
    """silu(gate) * up of bf16 in `layout`, in fp32, rounded once to bf16."""
    g, u = (row_stream.widen(x, layout) for x in (gate, up))
    e = mosaic.exp2(mosaic.mul(g, -math.log2(math.e), layout), layout)
    sigmoid = mosaic.reciprocal(mosaic.add(e, 1.0, layout), layout)
    return row_stream.narrow(mosaic.mul(mosaic.mul(g, sigmoid, layout), u, layout), layout)
