"""Attention of many rows: one persistent program per SM walks the KV blocks of a tile of tokens, split after split.

Consumer warpgroups hold 64 rows each, (token, query head of the group), and share the tile's K and V blocks, which a
producer warpgroup fetches page by page. They take turns on the tensor core: while one multiplies, the others compute their
softmax (FlashAttention-3, section 3.1), and a warpgroup's scores of the next block are issued with its P V of this one.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.attention import hopper_rows
from pallas_kernels.attention.hopper_softmax import Total, finish, full
from pallas_kernels.attention.hopper_tiles import ROWS, Deal, Shape, Tile, descending, tiles
from pallas_kernels.attention.hopper_walk import LANES, Memory, Turns, copy_q, drain, fetch, q_scratch, walk
from pallas_kernels.attention.reference import NEVER
from pallas_kernels.attention.schedules import CONSUMER_REGISTERS, MANY, PRODUCER_REGISTERS, Many


def work_list(q_start_S1, kv_len_S, table_SP, T: int, shape: Shape, schedule: Many | None = None):
    """(int32 [N, 5], tiles of the rows, the largest first; int32 [1], how many are real). Page tables are not needed."""
    del table_SP
    table_N5, count = tiles(q_start_S1, kv_len_S, T, (schedule or MANY[shape.d]).warpgroups * shape.tokens, shape.block)
    size_N = jnp.where(table_N5[:, 2] > 0, table_N5[:, 4], -1)  # those that do not exist come last
    return table_N5[descending(size_N)], count[None]


def attention(
    q_THd, k_Rd, v_Rd, q_start_S1, kv_len_S, table_SP, layer, shape: Shape, schedule: Many | None = None, work=None
):
    """(o [T, H, d], log-sum-exp in log2 units, fp32 [T, H]).

    Args:
      q_THd: bf16.
      k_Rd, v_Rd: bf16 [rows of all pages, K * d].
      q_start_S1, kv_len_S, table_SP: int32, as the op has them.
      layer: int32 [1], whose pages are read where k_Rd and v_Rd are stacks (`Shape.layer_rows`).
      shape: static sizes.
      schedule: None for the table's.
      work: what `work_list` gives; None to compute it here.
    """
    T, H, d = q_THd.shape
    plan = schedule or MANY[d]
    W, slots = plan.warpgroups, plan.slots
    table_N5, count = work or work_list(q_start_S1, kv_len_S, table_SP, T, shape, plan)
    N = table_N5.shape[0]
    operands = (q_THd, k_Rd, v_Rd, kv_len_S, table_SP, layer, table_N5, count)

    def body(q_g, k_g, v_g, kv_len_g, table_g, layer_g, tiles_g, count_g, o_g, lse_g, *park_g, scratch):
        cta, me = lax.axis_index("cta"), lax.axis_index("wg")
        q_memory, ring_s, *park_s, ready, free, q_ready, turn, cleared = scratch
        deal = Deal(cta, mosaic.SMS, count_g[0] * shape.K)
        trips = deal.count()

        def item(i):
            """(tile, KV head) of this program's i-th item."""
            at = deal[i]
            n = jnp.minimum(lax.div(at, shape.K), N - 1)
            return Tile(*(tiles_g[n, j] for j in range(5))), lax.rem(at, shape.K)

        @pl.when(me == W)
        def _producer():
            plgpu.set_max_registers(PRODUCER_REGISTERS[W], action="decrease")
            memory = Memory(None, ring_s, ready, free, keys_ahead=plan.overlap)

            def one_item(i, count):
                tile, head = item(i)
                return fetch(shape, memory, k_g, v_g, table_g, tile, head, layer_g[0] * shape.layer_rows, 0, tile.blocks, count, slots)

            drain(memory, lax.fori_loop(0, trips, one_item, jnp.int32(0)), slots)

        @pl.when(me < W)
        def _consumer():
            plgpu.set_max_registers(CONSUMER_REGISTERS[W], action="increase")
            turns = Turns(turn, me, W if plan.turns else 1)
            turns.open()
            token0 = me * shape.tokens

            def copy(tile: Tile, head):
                copy_q(shape, q_g, q_memory, q_ready.at[me], me, tile.token + token0, head)

            def lookup(i):
                """The fields of an item, and its sequence's kv_len."""
                tile, head = item(i)
                return tile, head, kv_len_g[jnp.minimum(tile.sequence, kv_len_g.shape[0] - 1)]

            first = lookup(jnp.int32(0))

            @pl.when(trips > 0)
            def _first_q():
                copy(*first[:2])

            def one_item(i, carry):
                count, (tile, head, kv_len) = carry
                following = lookup(i + 1)  # early: what comes from memory is there when it is needed
                park = park_s[0].at[me] if plan.park_in_shared else park_g[0].at[cta, me]
                limit = jnp.clip(tile.tokens - token0, 0, shape.tokens) * shape.G
                plgpu.barrier_wait(q_ready.at[me])

                def write(total: Total):
                    o_Md, lse_M = finish(total)
                    where = (tile.token + token0, head * shape.G, limit, shape.G)
                    hopper_rows.store(o_g, o_Md, *where)
                    hopper_rows.store(lse_g, lse_M, *where)

                def next_q():
                    @pl.when(i + 1 < trips)
                    def _():
                        copy(*following[:2])

                def attend():
                    memory = Memory(q_memory[0].at[me], ring_s, ready, free, 0, cleared, W, me, plan.overlap)
                    total, _, after = walk(
                        shape, memory, turns, tile, token0, kv_len, 0, tile.blocks, count, plan, park, next_q
                    )
                    write(total)
                    return after

                def nothing():
                    write(Total(full(NEVER, (ROWS,)), full(0, (ROWS,)), full(0, (ROWS, d))))
                    next_q()
                    return count

                return lax.cond(tile.blocks > 0, attend, nothing), following

            lax.fori_loop(0, trips, one_item, (jnp.int32(0), first))
            turns.close()

    out = [jax.ShapeDtypeStruct((T, H, d), jnp.bfloat16), jax.ShapeDtypeStruct((T, H), jnp.float32)]
    if not plan.park_in_shared:
        out.append(jax.ShapeDtypeStruct((mosaic.SMS, W, ROWS, d), jnp.float32))
    park = []
    if plan.park_in_shared:
        transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        park = [plgpu.SMEM((W, ROWS, d), jnp.float32, transforms=transforms)]
    outputs = mosaic.kernel(
        body,
        out_type=out,
        scratch_types=dict(
            scratch=[
                q_scratch(shape, W),
                plgpu.SMEM((slots, shape.block, d), jnp.bfloat16, transforms=mosaic.TILED),
                *park,
                plgpu.Barrier(num_arrivals=shape.pieces, num_barriers=slots),
                plgpu.Barrier(num_arrivals=W, num_barriers=slots),
                plgpu.Barrier(num_arrivals=d // 64, num_barriers=W),
                plgpu.Barrier(num_barriers=W),
                plgpu.Barrier(num_arrivals=W),
            ]
        ),
        grid=(mosaic.SMS,),
        grid_names=("cta",),
        num_threads=W + 1,
        thread_name="wg",
        compiler_params=LANES,
    )(*operands)
    return outputs[0], outputs[1]
