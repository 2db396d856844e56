"""Backward of paged causal attention on Hopper tensor cores: one kernel, five products a tile, the same bits every run.

FlashAttention-2, algorithm 2, with the probabilities transposed. A program owns a tile of keys of one KV head: dk and dv
stay in its registers while it walks the query tiles that see those keys, for all query heads of the group. Its share of
dq it adds to memory, fp32, and shares of one row are added in the order of the key tiles: a counter for every (query
tile, head) says whose turn it is. Tiles are walked last first, so that a program follows the one before it at a distance
of one tile, and a program waits only for programs that were launched before it.

Nothing here reaches the contract: gradients need the same bits from run to run, and only there.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.attention.reference import softmax_scale

WGMMA = plgpu.Layout.WGMMA
COLUMNS = WGMMA.reduce(0)
TILED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
ALIGN = 8
"""TMA moves groups of 8 rows: a sequence's first query tile begins at the last multiple of 8 rows before it."""
NOWHERE = 2**23
"""Key tile of an item of work that does not exist."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tile sizes of one head_dim. Two warpgroups compute; each holds 64 x `columns` of dk and of dv."""

    d: int
    keys: int
    queries: int
    stages: int

    @property
    def columns(self) -> int:
        return self.d * self.keys // 128


SCHEDULES = {
    64: Schedule(64, keys=128, queries=128, stages=2),
    128: Schedule(128, keys=128, queries=64, stages=2),
    256: Schedule(256, keys=64, queries=64, stages=1),
}


def plan(q_start_S1, kv_len_S, schedule: Schedule, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Work items in launch order, as int32 arrays: (sequence [count], key tile [count], first query tile of each sequence).

    Key tiles with most of their sequence after them come first; tiles of one sequence are in order. Items past the last
    real one are key tile NOWHERE.
    """
    tiles_S = (kv_len_S + schedule.keys - 1) // schedule.keys
    end_S = jnp.cumsum(tiles_S)
    item_C = jnp.arange(count)
    seq_C = jnp.sum(end_S[None] <= item_C[:, None], axis=1)
    real_C = seq_C < kv_len_S.shape[0]
    seq_C = jnp.minimum(seq_C, kv_len_S.shape[0] - 1)
    tile_C = item_C - (end_S - tiles_S)[seq_C]
    order_C = jnp.argsort(jnp.where(real_C, tile_C - tiles_S[seq_C], 0), stable=True)
    tile_C = jnp.where(real_C, tile_C, NOWHERE)
    q_len_S = q_start_S1[1:] - q_start_S1[:-1]
    q_tiles_S = jnp.where(q_len_S > 0, q_len_S // schedule.queries + 2, 0)
    arrays = seq_C[order_C], tile_C[order_C], jnp.cumsum(q_tiles_S) - q_tiles_S
    return tuple(x.astype(jnp.int32) for x in arrays)


def places(q_start_S1, q_tile_S, T: int, schedule: Schedule, q_tiles: int) -> jax.Array:
    """int32 [T]: where each row lies in the query tiles, [q_tiles * queries]; past them for padding rows."""
    row_T = jnp.arange(T)
    seq_T = jnp.sum(q_start_S1[None, 1:] <= row_T[:, None], axis=1)
    begin_T = q_start_S1.at[seq_T].get(mode="clip")
    at_T = q_tile_S.at[seq_T].get(mode="clip") * schedule.queries + row_T - begin_T + begin_T % ALIGN
    return jnp.where(seq_T < q_tile_S.shape[0], at_T, q_tiles * schedule.queries)


def attention_backward(
    q_THd, k_pages, v_pages, q_start_S1, kv_len_S, page_table_SP, o_THd, lse_TH, do_THd
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq [T, H, d], dk pages, dv pages), bf16, of `hopper.attention` from its output and log-sum-exp (log2 units).

    No page belongs to two sequences: dk and dv of such a page would be those of whichever program stored last. What is not
    finite in rows of q past the last sequence, or in rows of pages that are not written, reaches nothing; do is finite
    everywhere.
    """
    T, H, d = q_THd.shape
    N, page, _, _ = k_pages.shape
    S, P = page_table_SP.shape
    schedule = SCHEDULES[d]
    items = min(S * (-(-P * page // schedule.keys)), N * page // schedule.keys + S)
    seq_C, tile_C, q_tile_S = plan(q_start_S1, kv_len_S, schedule, items)
    delta_TH = jnp.sum(o_THd.astype(jnp.float32) * do_THd.astype(jnp.float32), axis=-1)
    # Accumulators of scores and of dp begin at what would be subtracted from them.
    rows = [q_THd, do_THd, -lse_TH / jnp.float32(softmax_scale(d)), -delta_TH]
    if pad := -T % ALIGN:
        rows = [jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in rows]
    q_RHd, do_RHd, lse_RH, delta_RH = rows
    tables = (seq_C, tile_C, q_tile_S, q_start_S1, kv_len_S, page_table_SP)
    grads = (jax.new_ref(jnp.zeros_like(k_pages)), jax.new_ref(jnp.zeros_like(v_pages)))
    q_tiles = T // schedule.queries + 2 * S
    dq_tiles = _kernel(schedule, q_tiles, q_RHd, k_pages, v_pages, do_RHd, lse_RH.T, delta_RH.T, tables, grads)
    at_T = places(q_start_S1, q_tile_S, T, schedule, q_tiles)
    dq_THd = dq_tiles.at[at_T].get(mode="fill", fill_value=0) * jnp.float32(1 / math.sqrt(d))
    return dq_THd.astype(q_THd.dtype), *(ref[...] for ref in grads)


def _kernel(schedule: Schedule, q_tiles_most: int, q_RHd, k_pages, v_pages, do_RHd, lse_HR, delta_HR, tables, grads):
    """dq by query tile without its scale, fp32 [tiles * queries, H, d]; writes grads (dk, dv pages). lse and delta are
    negated."""
    keys, queries, stages, d = schedule.keys, schedule.queries, schedule.stages, schedule.d
    _, H, _ = q_RHd.shape
    _, page, K, _ = k_pages.shape
    G, dtype = H // K, q_RHd.dtype
    pages_most = tables[-1].shape[1]
    load_rows, store_rows = min(page, keys), min(page, keys // 2)

    def body(q_g, k_g, v_g, do_g, lse_g, delta_g, seq_g, tile_g, q_tile_g, start_g, len_g, table_g, dk_g, dv_g, dq_g,
             k_s, v_s, q_s, do_s, ds_s, dq_s, lse_s, delta_s, kv_here, here, free, pair, dq_here, dq_gone):  # fmt: skip
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((q_tiles_most * H,)))
        item, head, wg = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")
        seq, tile = seq_g[item], tile_g[item]
        kv_len, first_row, end_row = len_g[seq], start_g[seq], start_g[seq + 1]
        first_key = tile * keys
        first_position = kv_len - (end_row - first_row)  # of the sequence's first query
        skip = lax.div(jnp.maximum(first_key - first_position, 0), jnp.int32(queries))  # query tiles before these keys
        row0 = first_row + skip * queries
        ragged = lax.rem(row0, jnp.int32(ALIGN))
        position0 = first_position + skip * queries - ragged
        left = kv_len - position0
        q_tiles = jnp.where(left > ragged, lax.div(left + (queries - 1), jnp.int32(queries)), 0)
        steps = q_tiles * G
        q_tile0 = q_tile_g[seq] + skip

        def query_tile(i):
            """(head of the group, query tile counted from position0) of step i."""
            g = lax.div(i, q_tiles)
            return g, (q_tiles - 1) - (i - g * q_tiles)

        def written(offset):
            return first_key + offset < kv_len

        def page_of(offset, rows):
            """(page, offset in it) of `rows` keys of this tile; some page if they are past the sequence."""
            key = first_key + offset
            column = jnp.minimum(lax.div(key, jnp.int32(page)), pages_most - 1)
            at = jnp.where(written(offset), table_g[seq, column], 0)
            return at, pl.ds(lax.div(lax.rem(key, jnp.int32(page)), jnp.int32(rows)) * rows, rows)

        def load():
            for offset in range(0, keys, load_rows):
                at, inside = page_of(offset, load_rows)
                for x_g, x_s in ((k_g, k_s), (v_g, v_s)):
                    plgpu.copy_gmem_to_smem(x_g.at[at, inside, head], x_s.at[0, pl.ds(offset, load_rows)], kv_here)

            def wait_free(i):
                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

            def step(i, _):
                slot = lax.rem(i, jnp.int32(stages))
                g, t = query_tile(i)
                at = pl.ds(lax.div(row0 + t * queries, jnp.int32(ALIGN)) * ALIGN, queries)  # shown to be a multiple
                h = head * G + g

                wait_free(i)
                plgpu.copy_gmem_to_smem(q_g.at[at, h], q_s.at[slot], here.at[slot])
                plgpu.copy_gmem_to_smem(lse_g.at[h, at], lse_s.at[slot], here.at[slot])
                plgpu.copy_gmem_to_smem(do_g.at[at, h], do_s.at[slot], here.at[slot])
                plgpu.copy_gmem_to_smem(delta_g.at[h, at], delta_s.at[slot], here.at[slot])

            lax.fori_loop(0, steps, step, None)
            lax.fori_loop(steps, steps + stages, lambda i, _: wait_free(i), None)

        def add_dq():
            def step(i, _):
                g, t = query_tile(i)
                h = head * G + g
                turn = turns.at[(q_tile0 + t) * H + h]
                target = dq_g.at[pl.ds((q_tile0 + t) * queries, queries), h]
                plgpu.barrier_wait(dq_here)
                plgpu.semaphore_wait(turn, tile, decrement=False, memory_scope="gpu")

                @pl.when(tile == 0)
                def _():
                    plgpu.copy_smem_to_gmem(dq_s, target)

                @pl.when(tile > 0)
                def _():
                    plgpu.copy_smem_to_gmem(dq_s, target, reduction_op="add")

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_gone)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

            lax.fori_loop(0, steps, step, None)

        @pl.when((wg == 2) & (first_key < kv_len))
        def _move():
            plgpu.set_max_registers(24, action="decrease")

            def by_warp():
                warp = lax.axis_index("warp")
                pl.when(warp == 0)(load)
                pl.when(warp == 1)(add_dq)

            pl.kernel(by_warp, out_type=(), mesh=plgpu.WarpMesh(axis_name="warp"))()

        @pl.when((wg < 2) & (first_key < kv_len))
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            row = wg * 64 if keys == 128 else 0
            mine = _slice(row, 64)
            columns = _slice(wg * (d // 2), d // 2)
            dkv = pl.ds(0, d) if keys == 128 else columns
            dq_rows = _slice(wg * 64 if queries == 128 else 0, 64)
            first_column = 0 if queries == 128 else wg * (d // 2)
            dq_columns = [_slice(first_column + c, 64) for c in range(0, max(d // 2, 64), 64)]
            plgpu.barrier_wait(kv_here)

            def both_warpgroups():
                plgpu.barrier_arrive(pair)
                plgpu.barrier_wait(pair)

            @pl.when(first_key + keys > kv_len)
            def _unwritten():
                part = 0, mine, dkv
                key = plgpu.broadcasted_iota(jnp.int32, (64, schedule.columns), 0, layout=WGMMA)
                kept = key < kv_len - first_key - row
                for x_s in (k_s, v_s):
                    x_s[part] = jnp.where(kept, x_s[part], 0)
                plgpu.commit_smem()
                both_warpgroups()

            def step(i, dk_acc, dv_acc):
                # 0, and the compiler does not know: else it keeps every address of K, V and one stage in registers.
                none = lax.div(i, steps)
                slot = lax.rem(i, jnp.int32(stages)) if stages > 1 else none
                ds_w = ds_s.at[lax.rem(i, jnp.int32(2))]
                _, t = query_tile(i)
                position = position0 + t * queries
                plgpu.barrier_wait(here.at[slot])

                @pl.when((position < first_position) | (position + queries > kv_len))
                def _others():  # rows of other sequences, and padding: no weight, and no NaN
                    def own(shape, layout, base):
                        at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + base
                        return (at >= first_position - position) & (at < kv_len - position)

                    base = 0 if queries == 64 else wg * 64
                    for at in dq_columns:
                        part = slot, dq_rows, at
                        q_s[part] = jnp.where(own((64, 64), WGMMA, base), q_s[part], 0)

                    @pl.when(wg == 0)
                    def _():
                        lse = plgpu.load(lse_s.at[slot], layout=COLUMNS)
                        lse_s[slot] = jnp.where(own((queries,), COLUMNS, 0), lse, -jnp.inf)

                    plgpu.commit_smem()
                    both_warpgroups()

                def spread(ref):
                    return lax.broadcast_in_dim(plgpu.load(ref.at[slot], layout=COLUMNS), (64, queries), [1])

                def scores(accs):
                    s_acc, dp_acc = accs
                    plgpu.wgmma(s_acc, k_s.at[none, mine], q_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma(dp_acc, v_s.at[none, mine], do_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)

                start = plgpu.ACC.init(spread(lse_s)), plgpu.ACC.init(spread(delta_s))
                s_KQ, dp_KQ = map(mosaic.here, pl.run_state(scores)(start))
                p_KQ = _causal(jnp.exp2(s_KQ * softmax_scale(d)), first_key + row - position)
                ds_KQ = (p_KQ * dp_KQ).astype(dtype)
                plgpu.wgmma(dv_acc, p_KQ.astype(dtype), do_s.at[slot, :, dkv])

                @pl.when((wg == 0) | (keys == 128))  # of fewer keys both warpgroups hold all
                def _():
                    ds_w[mine] = ds_KQ

                plgpu.commit_smem()
                plgpu.barrier_arrive(pair)
                plgpu.wgmma(dk_acc, ds_KQ, q_s.at[slot, :, dkv])
                plgpu.barrier_wait(pair)

                for j, at in enumerate(dq_columns):

                    def product(acc, at=at):
                        plgpu.wgmma(acc, ds_w.at[:, dq_rows].transpose((1, 0)), k_s.at[none, :, at])
                        return mosaic.here(acc[...])

                    dq_QD = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
                    if at is dq_columns[-1]:
                        plgpu.barrier_arrive(free.at[slot])
                    if j == 0:

                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_wait(dq_gone)

                    dq_s[dq_rows, at] = dq_QD
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_here)

            def walk(dk_acc, dv_acc):
                lax.fori_loop(0, steps, lambda i, _: step(i, dk_acc, dv_acc), None)
                return mosaic.here(dk_acc[...]), mosaic.here(dv_acc[...])

            shape = plgpu.ACC((64, schedule.columns), jnp.float32)
            dk_KD, dv_KD = pl.run_scoped(walk, shape, shape)
            both_warpgroups()  # nobody reads the keys any more
            k_s[0, mine, dkv] = (dk_KD * (1 / math.sqrt(d))).astype(dtype)
            v_s[0, mine, dkv] = dv_KD.astype(dtype)
            plgpu.commit_smem()
            both_warpgroups()
            for i in range(keys // 2 // store_rows):
                offset = wg * (keys // 2) + i * store_rows
                at, inside = page_of(offset, store_rows)
                for x_s, x_g in ((k_s, dk_g), (v_s, dv_g)):
                    source = x_s.at[0, _slice(offset, store_rows)]
                    plgpu.copy_smem_to_gmem(source, x_g.at[at, inside, head], written(offset))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_wait(dq_gone)

    def tiles(*shape):
        return plgpu.SMEM(shape, dtype, transforms=mosaic.TILED)

    (dq_tiles,) = mosaic.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((q_tiles_most * queries, H, d), jnp.float32),),
        grid=(tables[0].shape[0], K),
        grid_names=("item", "head"),
        num_threads=3,
        thread_name="wg",
        scratch_types=(
            tiles(1, keys, d), tiles(1, keys, d), tiles(stages, queries, d), tiles(stages, queries, d), tiles(2, keys, queries),
            plgpu.SMEM((queries, d), jnp.float32, transforms=TILED_F32),
            plgpu.SMEM((stages, queries), jnp.float32), plgpu.SMEM((stages, queries), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * keys // load_rows), plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages), plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2), plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q_RHd, k_pages, v_pages, do_RHd, lse_HR, delta_HR, *tables, *grads)  # fmt: skip
    return dq_tiles


def _slice(start, size: int):
    """`size` elements from a multiple of size (at most 128)."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def _causal(x_KQ: jax.Array, ahead: jax.Array) -> jax.Array:
    """x, 0 where the key comes after the query; `ahead`: position of the first key less that of the first query.

    jnp.where on two iotas would keep a register for every element's place all through the loop.
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x_KQ.shape, jnp.float32, layout=WGMMA),
    )
    def emit(_, x, ahead):
        i32 = ir.IntegerType.get_signless(32)

        def const(value):
            return utils.c(value, i32)

        thread = arith.remui(utils.thread_idx(), const(128))
        lane = arith.remui(thread, const(32))
        key = arith.addi(arith.muli(arith.divui(thread, const(32)), const(16)), arith.divui(lane, const(4)))
        query = arith.muli(arith.remui(lane, const(4)), const(2))
        # Opaque: what differs between a thread's elements stays an immediate of each comparison.
        operands = [arith.subi(query, key), ahead.registers.item()]
        lead = llvm.inline_asm(i32, operands, "sub.s32 $0, $1, $2;", "=r,r,r", has_side_effects=True)
        zero = utils.c(0.0, ir.F32Type.get())
        out = np.empty_like(x.registers)
        for at, pair in np.ndenumerate(x.registers):  # at[1]: group of 8 queries, at[4]: of 8 keys
            for e in range(2):
                seen = arith.cmpi(arith.CmpIPredicate.sge, lead, const(8 * at[4] - 8 * at[1] - e))
                pair = vector.insert(arith.select(seen, vector.extract(pair, [], [e]), zero), pair, [], [e])
            out[at] = pair
        return fragmented_array.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return emit(x_KQ, ahead)
