"""The arithmetic of a head's norm and rotation on Hopper, one for every kernel that does it."""

from __future__ import annotations

import jax

from pallas_kernels import mosaic, row_stream


def turn(a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array, weight: tuple | None, eps: float, layout):
    """(first half, second half) of heads that are normed, if there is a weight, and rotated.

    Args:
      a, b: bf16 [M, h], the halves of M heads, in `layout` (`hopper_layout.row_layout`), in which the bits are defined.
      cos, sin: bf16 like a.
      weight: the norm's halves, bf16 like a; None for no norm.
      eps: added to the mean square.
    """
    if weight is not None:
        h = a.shape[1]
        a32, b32 = row_stream.widen(a, layout), row_stream.widen(b, layout)
        total = mosaic.fma(b32, b32, mosaic.mul(a32, a32, layout), layout)
        r = row_stream.inverse_root(total.sum(axis=1), 2 * h, eps, layout.reduce(1))
        r = row_stream.spread(r, a.shape, (0,), layout)
        a, b = (
            row_stream.mul(row_stream.narrow(mosaic.mul(x, r, layout), layout), w, layout)
            for x, w in zip((a32, b32), weight, strict=True)
        )
    times = lambda x, y: row_stream.mul(x, y, layout)  # noqa: E731
    low = row_stream.sub(times(a, cos), times(b, sin), layout)
    high = row_stream.add(times(b, cos), times(a, sin), layout)
    return low, high
