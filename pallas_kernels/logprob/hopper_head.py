"""Training's log-probability on Hopper: what becomes of a tile of logits in the kernel that multiplies it.

The forward keeps block sums and the target's logit, the backward writes the logits' gradient in bf16: logits themselves never
reach memory. The gradient walks the vocabulary in chunks, so that each chunk of the weight's gradient is one library dot over
all tokens and is written once.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_large, schedules
from pallas_kernels.gemm.schedules import Schedule
from pallas_kernels.logprob import VOCAB_BLOCK, padded_vocab
from pallas_kernels.logprob.hopper_blocks import LOG2E, ROWS, block_sums

CHUNK = 16384
"""Largest part of the vocabulary whose gradient of the logits exists at one time."""
COLUMNS = 64
"""Columns of the gradient of the logits that are stored together: one swizzled row of bf16."""
SHAPE = (ROWS, VOCAB_BLOCK)
WGMMA = plgpu.Layout.WGMMA


def _load_rows(ref, row) -> jax.Array:
    return plgpu.load(ref.at[pl.ds(row, ROWS)], layout=mosaic.row_layout(), optimized=False)


def _schedule(T: int, N: int, D: int) -> Schedule:
    """The GEMM's own, where its consumers take whole blocks of the vocabulary."""
    schedule = schedules.large(T, N, D, 1)
    return schedule if schedule.warpgroup_tile[1] % VOCAB_BLOCK == 0 else Schedule(128, 256)


def _covered(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _sums_epilogue(V, width, targets_P, inv_temp_P, schedule) -> hopper_large.Epilogue:
    """Block sums of each row, and its target's logit where the target's block is: [blocks, P] each."""
    P = inv_temp_P.shape[0]
    blocks = width // VOCAB_BLOCK
    wg_m, wg_n = schedule.warpgroup_tile
    pieces = [(i, j) for i in range(0, wg_m, ROWS) for j in range(0, wg_n, VOCAB_BLOCK)]
    # Which pieces hold a target of any of their rows: few do, and the others need not look. (Not a scatter: XLA's is slow.)
    block_mM = (targets_P // VOCAB_BLOCK).reshape(-1, ROWS)
    hit_mn = jnp.any(block_mM[..., None] == jnp.arange(blocks), axis=1).astype(jnp.int32)

    def run(acc_mn, tile, inputs, outputs, scratch):
        del scratch
        inv_temp_g, targets_g, hit_g = inputs
        max_g, sum_g, target_g = outputs
        # All loads of few values first: they arrive together.
        inv_temp = {i: _load_rows(inv_temp_g, tile.row + i) for i, _ in pieces}
        hits = [hit_g[lax.div(tile.row + i, ROWS), lax.div(tile.col + j, VOCAB_BLOCK)] for i, j in pieces]
        for (i, j), hit in zip(pieces, hits, strict=True):
            row, col = tile.row + i, tile.col + j
            block = lax.div(col, VOCAB_BLOCK)
            at = pl.ds(row, ROWS)
            z_MV = acc_mn[i : i + ROWS, j : j + VOCAB_BLOCK]
            n_MV = plgpu.broadcasted_iota(jnp.int32, SHAPE, 1, layout=WGMMA) + col

            def store(z_MV, at=at, block=block, inv_temp_M=inv_temp[i]):
                max_g[block, at], sum_g[block, at] = block_sums(z_MV, inv_temp_M)

            @pl.when(col + VOCAB_BLOCK <= V)
            def _(store=store, z_MV=z_MV):
                store(z_MV)

            @pl.when(col + VOCAB_BLOCK > V)
            def _(store=store, z_MV=z_MV, n_MV=n_MV):
                store(jnp.where(n_MV < V, z_MV, -jnp.inf))

            @pl.when(hit > 0)
            def _(z_MV=z_MV, n_MV=n_MV, row=row, block=block, at=at):
                target_MV = mosaic.rows(_load_rows(targets_g, row), SHAPE)
                target_g[block, at] = jnp.where(n_MV == target_MV, z_MV, -jnp.inf).max(axis=1)

    sums = jax.ShapeDtypeStruct((blocks, P), jnp.float32)
    return hopper_large.Epilogue(
        run,
        outputs=(sums, jax.ShapeDtypeStruct(sums.shape, jnp.int32), sums),
        inputs=(inv_temp_P, targets_P, hit_mn),
    )


def sums(x_TD, w_VD, targets_T, inv_temp_T) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(block maxima, block sums, targets' logits, inverse temperatures) of `hopper_combine.combine`, for T padded to P rows.

    Args:
      x_TD: bf16 [T, D], T at most 8 or a multiple of 8.
      w_VD: bf16 [V, D].
      targets_T, inv_temp_T: int32 and fp32 [T].
    """
    T, D = x_TD.shape
    V = w_VD.shape[0]
    schedule = _schedule(T, padded_vocab(V), D)
    P = _covered(T, max(128, schedule.tile_m * schedule.cluster[0]))
    width = _covered(padded_vocab(V), schedule.tile_n * schedule.cluster[1])
    targets_P = jnp.pad(targets_T, (0, P - T))
    inv_temp_P = jnp.pad(inv_temp_T, (0, P - T), constant_values=1)
    epilogue = _sums_epilogue(V, width, targets_P, inv_temp_P, schedule)
    max_nP, sum_nP, target_nP = hopper_large.matmul(x_TD, w_VD, None, 1, padded_vocab(V), epilogue, schedule)
    return max_nP, sum_nP, target_nP[targets_P // VOCAB_BLOCK, jnp.arange(P)], inv_temp_P


def _gradient_epilogue(T, N, first, targets_P, inv_temp_P, lse_P, g_P, schedule) -> hopper_large.Epilogue:
    """bf16 [T, N]: g inv_temp (onehot - softmax) of logits of the vocabulary's entries from `first` on."""
    slots = 2
    wide = lambda x_M: mosaic.rows(x_M, (ROWS, COLUMNS))  # noqa: E731
    wg_m, wg_n = schedule.warpgroup_tile

    def run(acc_mn, tile, inputs, outputs, scratch):
        inv_temp_g, targets_g, lse_g, scale_g = inputs
        (dz_g,), (staged,) = outputs, scratch
        for i in range(0, wg_m, ROWS):
            row = tile.row + i
            inv_temp_M, lse_M, scale_M = (_load_rows(ref, row) for ref in (inv_temp_g, lse_g, scale_g))
            target_M = _load_rows(targets_g, row) - tile.col
            for j in range(0, wg_n, COLUMNS):
                z_MV = acc_mn[i : i + ROWS, j : j + COLUMNS]
                n_MV = plgpu.broadcasted_iota(jnp.int32, z_MV.shape, 1, layout=WGMMA) + j
                s_MV = mosaic.mul(z_MV, wide(inv_temp_M))
                p_MV = mosaic.exp2(mosaic.fma(s_MV, LOG2E, wide(-lse_M)))
                dz_MV = jnp.where(n_MV == wide(target_M), 1.0 - p_MV, -p_MV) * wide(scale_M)
                slot = (j // COLUMNS) % slots
                plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                staged[tile.wg, slot] = dz_MV.astype(jnp.bfloat16)
                plgpu.commit_smem()
                at = dz_g.at[pl.ds(row, ROWS), pl.ds(tile.col + j, COLUMNS)]
                plgpu.copy_smem_to_gmem(staged.at[tile.wg, slot], at)

    return hopper_large.Epilogue(
        run,
        outputs=(jax.ShapeDtypeStruct((T, N), jnp.bfloat16),),
        inputs=(inv_temp_P, targets_P - first, lse_P * LOG2E, g_P * inv_temp_P),
        scratch=(plgpu.SMEM((schedule.consumers, slots, ROWS, COLUMNS), jnp.bfloat16, transforms=mosaic.TILED),),
    )


def gradient(x_TD, w_VD, targets_T, inv_temp_T, lse_T, g_T, dw_dtype) -> tuple[jax.Array, jax.Array]:
    """(dx fp32 [T, D], dw [V, D] in dw_dtype) of sum(g logprob); arguments as in `sums`, lse and g fp32 [T]."""
    T, D = x_TD.shape
    V = w_VD.shape[0]
    chunk = min(_covered(-(-V // -(-V // CHUNK)), 256), V)
    schedule = _schedule(T, chunk, D)
    extra = _covered(T, schedule.tile_m * schedule.cluster[0]) - T
    pad = lambda x_T, fill=0: jnp.pad(x_T, (0, extra), constant_values=fill)  # noqa: E731
    rows = pad(targets_T), pad(inv_temp_T, 1), pad(lse_T), pad(g_T)

    def part(first, N, dx_TD, dw_VD):
        w_ND = lax.dynamic_slice_in_dim(w_VD, first, N)
        if N % COLUMNS:  # rows of zeros: they add nothing to dx, and their own gradient is cut
            w_ND = jnp.pad(w_ND, ((0, -N % COLUMNS), (0, 0)))
        epilogue = _gradient_epilogue(T, w_ND.shape[0], first, *rows, schedule)
        (dz_TN,) = hopper_large.matmul(x_TD, w_ND, None, 1, w_ND.shape[0], epilogue, schedule)
        dx_TD += lax.dot_general(dz_TN, w_ND, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        dw_ND = lax.dot_general(dz_TN, x_TD, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return dx_TD, lax.dynamic_update_slice_in_dim(dw_VD, dw_ND[:N].astype(dw_dtype), first, 0)

    whole, rest = divmod(V, chunk)
    grads = jnp.zeros((T, D), jnp.float32), jnp.zeros((V, D), dw_dtype)
    if whole > 1:
        grads = lax.fori_loop(0, whole, lambda i, grads: part(i * chunk, chunk, *grads), grads)
    elif whole:
        grads = part(0, chunk, *grads)
    return part(whole * chunk, rest, *grads) if rest else grads
