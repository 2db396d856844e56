"""Query and key norm and rotary positions on Hopper: tiles of tokens of one KV head stream through shared memory."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_stream
from pallas_kernels.qk_norm_rope import hopper_backward, hopper_of_gemm, hopper_pages
from pallas_kernels.qk_norm_rope.hopper_layout import row_layout, tile_rows
from pallas_kernels.qk_norm_rope.hopper_turn import turn
from pallas_kernels.weight import Weight

VERSION = 1


def entry(shape: tuple[int, int, int], eps: float, theta: float, table_hash: str, has_norm: bool, dtype) -> dict:
    """This implementation's line in the contract: all that reaches the bits. shape: (K, G + 2, d)."""
    row_stream.refuse_all_but_bf16("qk_norm_rope", dtype)
    norm = {
        "norm_order": "the two halves in order, 8 neighbours in order, lanes by doubling distance",
        "eps": float(eps).hex(),
        "normalise": "x * (1 / sqrt(sum / width + eps)), each operation rounded to nearest",
        "norm_round": [f"normalised: {dtype}", f"times weight: {dtype}"],
    }
    return {
        "implementation": "hopper",
        "version": VERSION,
        "arch": "sm90",
        "inside": "float32",
        **(norm if has_norm else {"norm": "none"}),
        "theta": float(theta).hex(),
        "table_sha256": table_hash,
        "rope_round": [f"cos, sin: {dtype}", f"each product: {dtype}", f"sum: {dtype}"],
        "shape": list(shape),
    }


def schedule(shape: tuple[int, int, int]) -> tuple[int, int]:
    """(slots, programs a multiprocessor) for (K, G + 2, d). Neither reaches the bits."""
    _, g2, d = shape
    slot = tile_rows(d // 2) * (g2 + 1) * d * 2
    stages = max(2, min(4, 73728 // slot))
    return stages, max(1, min(4, 221184 // (stages * slot)))


@functools.partial(jax.jit, static_argnames=("eps", "plan", "layer_rows"))
def _call(qkv_TKgd, cos_sin_T2h, norms: tuple[Weight, ...], paged=None, *, eps: float, plan, layer_rows: int = 0):
    """paged: (pages of keys and of values of all layers, [rows, K * d] each; int32 [T], rows of them in a layer; int32 [1],
    the layer), or None where keys and values are results."""
    T, K, g2, d = qkv_TKgd.shape
    h, groups, dtype = d // 2, g2 - 2, qkv_TKgd.dtype
    rows = tile_rows(h)
    layout = row_layout(h)
    stages, programs = plan
    tiles = -(-T // rows) * K
    halves = (pl.ds(0, h), pl.ds(h, h))
    stacks = [(w.value, *w.index()) for w in norms]

    def body(in_g, cos_sin_g, *refs):
        stacks_g = jax.tree.unflatten(jax.tree.structure(stacks), refs[: jax.tree.structure(stacks).num_leaves])
        refs = refs[jax.tree.structure(stacks).num_leaves :]
        if paged is None:
            q_g, k_g, v_g = refs
        else:
            k_pages_g, v_pages_g, slots_g, layer_g, q_g = refs
        read = lambda ref, layout=layout: plgpu.load(ref, layout=layout, optimized=False)  # noqa: E731
        spread = lambda x, axis: row_stream.spread(x, (rows, h), (axis,), layout)  # noqa: E731
        weights = [
            [spread(read(w.at[(*(ref[0] for ref in layer), half)], layout.reduce(0)), 1) for half in halves]
            for w, *layer in stacks_g
        ]

        def scoped(q_s, k_s, v_s, cos_sin_s, loaded):
            def corner(tile):
                return pl.ds(lax.div(tile, K) * rows, rows), lax.rem(tile, K)

            def load(tile, slot):
                t, k = corner(tile)
                for source, s in (
                    (in_g.at[t, k, pl.ds(0, groups)], q_s),
                    (in_g.at[t, k, groups], k_s),
                    (in_g.at[t, k, groups + 1], v_s),
                    (cos_sin_g.at[t], cos_sin_s),
                ):
                    plgpu.copy_gmem_to_smem(source, s.at[slot], loaded.at[slot])

            def turn_in_place(head, cos, sin, weight):
                turned = turn(*(read(head.at[:, half]) for half in halves), cos, sin, weight, eps, layout)
                for half, x in zip(halves, turned, strict=True):
                    head.at[:, half][...] = x

            def work(slot, carry):
                cos, sin = (read(cos_sin_s.at[slot, :, i]) for i in (0, 1))
                for g in range(groups):
                    turn_in_place(q_s.at[slot, :, g], cos, sin, weights[0] if norms else None)
                turn_in_place(k_s.at[slot], cos, sin, weights[1] if norms else None)
                return carry

            def store(tile, slot):
                t, k = corner(tile)
                results = [(q_s, q_g)] if paged is not None else [(q_s, q_g), (k_s, k_g), (v_s, v_g)]
                for s, g in results:
                    plgpu.copy_smem_to_gmem(s.at[slot], g.at[t, k], commit_group=False)
                if paged is not None:
                    slot_M = read(slots_g.at[t], layout.reduce(1))
                    row_M = jnp.where(slot_M < layer_rows, slot_M + layer_g[0] * layer_rows, -1)
                    column_Mh = plgpu.broadcasted_iota(jnp.int32, (rows, h), 1, layout=layout)
                    for s, g in ((k_s, k_pages_g), (v_s, v_pages_g)):
                        for i, half in enumerate(halves):
                            x_Mh = read(s.at[slot, :, half])
                            hopper_pages.store(g, x_Mh, spread(row_M, 0), column_Mh + (k * d + i * h), layout)

            row_stream.stream(tiles, stages, loaded, load, work, store)

        pl.run_scoped(
            scoped,
            plgpu.SMEM((stages, rows, groups, d), dtype),
            plgpu.SMEM((stages, rows, d), dtype),
            plgpu.SMEM((stages, rows, d), dtype),
            plgpu.SMEM((stages, rows, 2, h), dtype),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        )

    out_type = [jax.ShapeDtypeStruct(s, dtype) for s in ((T, K, groups, d), (T, K, d), (T, K, d))]
    run = row_stream.kernel(
        body, programs=row_stream.programs(tiles, programs), out_type=out_type if paged is None else out_type[:1]
    )
    if paged is None:
        q_TKgd, *k_and_v = run(qkv_TKgd, cos_sin_T2h, *jax.tree.leaves(stacks))
    else:
        *pages, slots_T, layer = paged
        slots_P = jnp.pad(slots_T, (0, -T % rows), constant_values=layer_rows)
        refs = [jax.new_ref(x) for x in pages]
        (q_TKgd,) = run(qkv_TKgd, cos_sin_T2h, *jax.tree.leaves(stacks), *refs, slots_P, layer)
        k_and_v = [ref[...] for ref in refs]
    return q_TKgd.reshape(T, K * groups, d), *k_and_v


def to_pages(qkv_TKgd, cos_sin_T2h, norms: tuple[Weight, ...], eps: float, k_pages, v_pages, slots_T, layer):
    """(q [T, H, d], k_pages, v_pages) with this call's keys and values in their places; one kernel, nothing else moves."""
    L, N, page, K, d = k_pages.shape
    pages = (x.reshape(L * N * page, K * d) for x in (k_pages, v_pages))
    paged = (*pages, slots_T, jnp.asarray(layer, jnp.int32).reshape(1))
    plan = schedule(qkv_TKgd.shape[1:])
    q_THd, *pages = _call(qkv_TKgd, cos_sin_T2h, norms, paged, eps=eps, plan=plan, layer_rows=N * page)
    return q_THd, *(x.reshape(k_pages.shape) for x in pages)


def qk_norm_rope(
    qkv_TKgd, cos_sin_T2h, norms: tuple[Weight, ...], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q [T, H, d], k [T, K, d], v [T, K, d])."""
    return _call(qkv_TKgd, cos_sin_T2h, norms, eps=eps, plan=schedule(qkv_TKgd.shape[1:]))


backward = hopper_backward.backward
schedule_of_gemm = hopper_of_gemm.schedule_for
of_gemm = hopper_of_gemm.of_gemm
