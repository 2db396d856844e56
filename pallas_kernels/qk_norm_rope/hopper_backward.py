"""Gradient of the query and key norm and the rotation on Hopper, in one pass: the rotation's transpose, then the norm's gradient.

No bits are claimed between shapes, but a launch has the same bits every time: a program adds up the weights' gradients of its
tiles in order, and XLA adds the programs' sums in a fixed order.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_stream
from pallas_kernels.qk_norm_rope.hopper_layout import row_layout, tile_rows

SHARED = 221184
"""Bytes of shared memory that the rings of a multiprocessor may take."""


def schedule(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(columns that a lane holds, slots, programs a multiprocessor) for (K, G + 2, d)."""
    _, g2, d = shape
    slot = lambda vector: tile_rows(d // 2, vector) * 2 * g2 * d * 2  # noqa: E731
    vector = 8 if 2 * slot(8) <= SHARED else 4
    return vector, 2, max(1, min(3, SHARED // (2 * slot(vector))))


@functools.partial(jax.jit, static_argnames=("eps", "plan"))
def _call(qkv_TKgd, cos_sin_T2h, norms, dq_TKGd, dk_TKd, dv_TKd, *, eps: float, plan):
    T, K, g2, d = qkv_TKgd.shape
    h, groups, dtype = d // 2, g2 - 2, qkv_TKgd.dtype
    vector, stages, programs = plan
    rows = tile_rows(h, vector)
    layout = row_layout(h, vector)
    tiles = -(-T // rows) * K
    programs = row_stream.programs(tiles, programs)
    halves = (pl.ds(0, h), pl.ds(h, h))
    n = len(norms)

    def body(x_g, cos_sin_g, *refs):
        norms_g, (dq_g, dk_g, dv_g, dx_g), sums_g = refs[:n], refs[n : n + 4], refs[n + 4 :]
        read = lambda ref, layout=layout: plgpu.load(ref, layout=layout, optimized=False)  # noqa: E731
        wide = lambda ref: row_stream.widen(read(ref), layout)  # noqa: E731
        spread = lambda x, axis: row_stream.spread(x, (rows, h), (axis,), layout)  # noqa: E731
        weights = [[spread(read(w.at[half], layout.reduce(0)), 1) for half in halves] for w in norms_g]

        def scoped(x_s, dq_s, dk_s, dv_s, cos_sin_s, loaded):
            def corner(tile):
                return pl.ds(lax.div(tile, K) * rows, rows), lax.rem(tile, K)

            def load(tile, slot):
                t, k = corner(tile)
                copies = [
                    (dq_g.at[t, k], dq_s),
                    (dk_g.at[t, k], dk_s),
                    (dv_g.at[t, k], dv_s),
                    (cos_sin_g.at[t], cos_sin_s),
                ]
                for source, s in copies + [(x_g.at[t, k, pl.ds(0, groups + 1)], x_s)] * bool(n):
                    plgpu.copy_gmem_to_smem(source, s.at[slot], loaded.at[slot])

            def turn_back(d_head, x_head, cos, sin, weight, sums):
                a, b = (wide(d_head.at[:, half]) for half in halves)
                dy = (a * cos + b * sin, b * cos - a * sin)
                if n:
                    x = [wide(x_head.at[:, half]) for half in halves]
                    r = row_stream.inverse_root((x[0] * x[0] + x[1] * x[1]).sum(axis=1), d, eps, layout.reduce(1))
                    r = spread(r, 0)
                    x = [v * r for v in x]
                    sums = tuple(s + g * v for s, g, v in zip(sums, dy, x, strict=True))
                    g = [v * row_stream.widen(w, layout) for v, w in zip(dy, weight, strict=True)]
                    mean = spread((g[0] * x[0] + g[1] * x[1]).sum(axis=1) * (1 / d), 0)
                    dy = [r * (u - v * mean) for u, v in zip(g, x, strict=True)]
                for half, v in zip(halves, dy, strict=True):
                    d_head.at[:, half][...] = row_stream.narrow(v, layout)
                return sums

            def work(slot, sums):
                cos, sin = (wide(cos_sin_s.at[slot, :, i]) for i in (0, 1))
                q_sums, k_sums = sums[:2], sums[2:]
                for g in range(groups):
                    q_sums = turn_back(
                        dq_s.at[slot, :, g], x_s.at[slot, :, g], cos, sin, weights[0] if n else None, q_sums
                    )
                k_sums = turn_back(dk_s.at[slot], x_s.at[slot, :, groups], cos, sin, weights[1] if n else None, k_sums)
                return (*q_sums, *k_sums)

            def store(tile, slot):
                t, k = corner(tile)
                for s, part in ((dq_s, pl.ds(0, groups)), (dk_s, groups), (dv_s, groups + 1)):
                    plgpu.copy_smem_to_gmem(s.at[slot], dx_g.at[t, k, part], commit_group=False)

            zeros = tuple(row_stream.full((rows, h), 0, layout) for _ in range(2 * n))
            sums = row_stream.stream(tiles, stages, loaded, load, work, store, carry=zeros)
            for i, s in enumerate(sums):
                sums_g[0].at[lax.axis_index(row_stream.AXIS), i][...] = s

        ring = [(groups + 1, d)] * bool(n), [(groups, d), (d,), (d,), (2, h)]
        smem = lambda *s: plgpu.SMEM((stages, rows, *s), dtype)  # noqa: E731
        pl.run_scoped(
            lambda rings, loaded: scoped(*rings[0] or [rings[1][0]], *rings[1], loaded),
            [[smem(*s) for s in part] for part in ring],
            plgpu.Barrier(num_arrivals=4 + bool(n), num_barriers=stages),
        )

    out_type = [jax.ShapeDtypeStruct(qkv_TKgd.shape, dtype)]
    out_type += [jax.ShapeDtypeStruct((programs, 4, rows, h), jnp.float32)] * bool(n)
    out = row_stream.kernel(body, programs=programs, out_type=out_type)(
        qkv_TKgd, cos_sin_T2h, *norms, dq_TKGd, dk_TKd, dv_TKd
    )
    return out[0], tuple(jnp.sum(out[1], axis=(0, 2)).reshape(2, d)) if n else ()


def backward(qkv_TKgd, cos_sin_T2h, norms, grads, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(gradient of qkv, fp32 gradients of the norm weights) from those of q [T, H, d], k and v [T, K, d]."""
    T, K, g2, d = qkv_TKgd.shape
    dq_TKGd = grads[0].reshape(T, K, g2 - 2, d)
    return _call(qkv_TKgd, cos_sin_T2h, norms, dq_TKGd, *grads[1:], eps=eps, plan=schedule(qkv_TKgd.shape[1:]))
