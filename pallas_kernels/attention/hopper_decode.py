"""Attention of few rows a sequence: splits of the KV are computed in parallel, and merged in order by a second kernel.

A tile's row has the bits that it has in the kernel of many rows: the same walk over the same blocks, merged by the same
function. What differs is who computes which split, and where the splits' results rest.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.attention import hopper_rows
from pallas_kernels.attention.hopper_shared import groups
from pallas_kernels.attention.hopper_softmax import COLUMNS, ROW, Total, finish, full, merge
from pallas_kernels.attention.hopper_tiles import ROWS, Deal, Shape, Tile, descending, needed, tiles
from pallas_kernels.attention.hopper_walk import (
    LANES,
    Memory,
    Open,
    Turns,
    clear_q,
    copy_q,
    drain,
    fetch,
    q_scratch,
    walk,
)
from pallas_kernels.attention.reference import NEVER
from pallas_kernels.attention.schedules import FEW, Few

WIDTH = 32
"""Columns of O that one program of the merge takes."""
AT_ONCE = 8
"""Splits whose parts the merge reads together."""


def items(table_N5, splits: int, per_split: int, begin_N):
    """(int32 [N * splits, 7], count): the fields of a tile, and blocks [first, last) of one split; whole splits first, then the
    largest rests. A tile's blocks before begin_N are left out, and the split that they end in counts as whole."""
    N = table_N5.shape[0]
    blocks_N, real_N = table_N5[:, 4], table_N5[:, 2] > 0
    done_N = begin_N // per_split
    whole_N = blocks_N // per_split - done_N
    rest_N = blocks_N - jnp.maximum(blocks_N // per_split * per_split, begin_N)
    some_N = real_N & ((rest_N > 0) | (blocks_N == 0))
    n_N = jnp.arange(N)
    whole_end_N = jnp.sum(jnp.where(n_N[None] <= n_N[:, None], whole_N[None], 0), axis=1)
    by_rank_N = descending(jnp.where(some_N, rest_N, -1))
    i_M = jnp.arange(N * splits)
    total = whole_end_N[-1]
    tile_M = jnp.minimum(jnp.sum(whole_end_N[None] <= i_M[:, None], axis=1), N - 1)
    tile_M = jnp.where(i_M < total, tile_M, by_rank_N[jnp.clip(i_M - total, 0, N - 1)])
    split_M = jnp.where(i_M < total, i_M - (whole_end_N - whole_N)[tile_M], whole_N[tile_M]) + done_N[tile_M]
    first_M = jnp.maximum(split_M * per_split, begin_N[tile_M])
    last_M = jnp.minimum((split_M + 1) * per_split, blocks_N[tile_M])
    fields = jnp.concatenate([table_N5[tile_M], jnp.stack([first_M, last_M], axis=1)], axis=1)
    return fields.astype(jnp.int32), (total + jnp.sum(some_N)).astype(jnp.int32)


def work_list(q_start_S1, kv_len_S, table_SP, T: int, shape: Shape, share: Callable | None = None, shortest_S=None):
    """(`items` of each launch, int32 [L, M, 7]; int32 [L], how many are real; tiles of the merge, int32 [N, 5], and how many).

    share: of a row for each sequence, T = S, the blocks that several sequences hold the same pages of are walked by a launch of
    their own, before that of all others, where this finds it worth it (`hopper_shared.pays`); None: there is no such launch.
    shortest_S: int32 [S], the least lengths that `shortened` may ask for: what is shared lies below them; None for kv_len_S.
    """
    splits = -(-table_SP.shape[1] * shape.page // shape.split)
    table_N5, _ = tiles(q_start_S1, kv_len_S, T, shape.tokens, shape.block)
    tables, begins = [table_N5], [jnp.zeros(table_N5.shape[0], jnp.int32)]
    if share:
        begin_S, groups_S5 = groups(q_start_S1, kv_len_S if shortest_S is None else shortest_S, table_SP, shape, share)
        tables, begins = [groups_S5, table_N5], [*begins, jnp.append(begin_S, 0)[table_N5[:, 0]]]
    of_each = jax.vmap(lambda table_N5, begin_N: items(table_N5, splits, shape.per_split, begin_N))
    merges_N5, merges = tiles(q_start_S1, kv_len_S, T, max(1, ROWS // shape.H), shape.block)
    return *of_each(jnp.stack(tables), jnp.stack(begins)), merges_N5, merges[None]


def shortened(work, longest_S, kv_len_S, shape: Shape):
    """What `work_list` gave for sequences of longest_S positions, for the same rows of sequences of kv_len_S: two small kernels.

    Lengths lie between that list's shortest_S and longest_S. Items keep their order, and with it their splits: one whose split
    has not begun has no blocks, and what it writes nobody reads.
    """
    items_LM7, count_L, merges_N5, merges = work
    less_S1 = jnp.append(longest_S - kv_len_S, 0)  # the sequence of padding stays as it is

    def cut(tiles_N5):
        tile = Tile(*jnp.moveaxis(tiles_N5, -1, 0))
        position = tile.position - less_S1[tile.sequence]
        blocks = jnp.minimum(tile.blocks, needed(position, tile.tokens, shape.block))
        return jnp.stack(tile._replace(position=position, blocks=blocks), axis=-1)

    tiles_LM5 = cut(items_LM7[..., :5])
    last_LM1 = jnp.minimum(items_LM7[..., 6:], tiles_LM5[..., 4:])
    own_LM7 = jnp.concatenate([tiles_LM5, items_LM7[..., 5:6], last_LM1], axis=-1)
    of_own_L11 = jnp.arange(len(count_L))[:, None, None] == len(count_L) - 1
    # Blocks that are shared lie below all lengths: their launch stays as it is.
    return jnp.where(of_own_L11, own_LM7, items_LM7), count_L, cut(merges_N5), merges


def attention(
    q_THd, k_Rd, v_Rd, q_start_S1, kv_len_S, table_SP, layer, shape: Shape, schedule: Few | None = None, work=None
):
    """(o [T, H, d], log-sum-exp in log2 units, fp32 [T, H]); arguments as in `hopper_forward.attention`."""
    T = q_THd.shape[0]
    splits = -(-table_SP.shape[1] * shape.page // shape.split)
    items_LM7, count_L, *merges = work or work_list(q_start_S1, kv_len_S, table_SP, T, shape)
    call = functools.partial(_call, shape, schedule or FEW[shape.d], splits)
    operands = (q_THd, k_Rd, v_Rd, kv_len_S, table_SP, layer, items_LM7, count_L)
    if len(count_L) == 1:
        results = call(Phase.ALL, *operands)
    else:
        results = call(Phase.OWN, *operands, *call(Phase.SHARED, *operands))
    return tuple(results) if splits == 1 else merge_splits(*results, *merges, shape, T)


class Phase(enum.Enum):
    """Which blocks a launch walks."""

    ALL = enum.auto()
    SHARED = enum.auto()  # those that several sequences have in common
    OWN = enum.auto()  # the others, after those


def _call(
    shape: Shape, plan: Few, splits: int, phase: Phase, q_THd, k_Rd, v_Rd, kv_len_S, table_SP, layer, items_LM7, count_L, *given
):
    """One launch; `given` to phase OWN is what phase SHARED returned.

    Returns o [T, H, d] and log-sum-exp [T, H] where there is one split, else what `merge_splits` takes; in phase SHARED that, if
    there are splits, and of each row the split that its group's blocks end in, m, l and O of an `Open`.
    """
    (T, H, d), S, (_, M, _) = q_THd.shape, kv_len_S.shape[0], items_LM7.shape
    launch = 1 if phase is Phase.OWN else 0
    pairs, slots, f32 = plan.pairs, plan.slots, jnp.float32
    result = [jax.ShapeDtypeStruct((T, H, d), jnp.bfloat16), jax.ShapeDtypeStruct((T, H), f32)]
    parts = []
    if splits > 1:
        parts = [jax.ShapeDtypeStruct((d // WIDTH, splits * T, H, WIDTH), f32)]
        parts += [jax.ShapeDtypeStruct((splits * T, H), f32)] * 2
    begun = [jax.ShapeDtypeStruct(s, f32) for s in ((T, H), (T, H, COLUMNS), (T, H, d))]
    out_type = parts + begun if phase is Phase.SHARED else parts or result
    if phase is Phase.OWN:
        # Parts of the splits that groups walked stay; the others are written beside them.
        refs = [jax.new_ref(x) for x in given[: len(parts)]]
        given = *refs, *given[len(parts) :]
        out_type = [] if parts else result

    def body(q_g, k_g, v_g, kv_len_g, table_g, layer_g, items_g, count_g, *out_g, scratch):
        q_memory, ring_s, ready, free, q_ready = scratch
        # Parts, open splits and a result in this order, of each what the phase has: what is given, and the outputs.
        parts_g, begun_g, result_g = out_g[: len(parts)], out_g[len(parts) : len(parts) + 3], out_g[-2:]
        mosaic.after_last_kernel()
        wg = lax.axis_index("wg")
        pair = lax.rem(wg, pairs)
        # Of few items each has a multiprocessor to itself.
        deal = Deal(pair * mosaic.SMS + lax.axis_index("cta"), mosaic.SMS * pairs, count_g[launch] * shape.K)
        trips = deal.count()
        memory = Memory(q_memory[0].at[pair], ring_s.at[pair], ready, free, pair * slots)

        def item(i):
            """(tile, first block, last block, KV head) of this worker's i-th item."""
            at = deal[i]
            m = jnp.minimum(lax.div(at, shape.K), M - 1)
            fields = [items_g[launch, m, j] for j in range(7)]
            return Tile(*fields[:5]), fields[5], fields[6], lax.rem(at, shape.K)

        @pl.when(wg >= pairs)
        def _producer():
            plgpu.set_max_registers(24, action="decrease")

            def one_item(i, count):
                tile, first, last, head = item(i)
                layer_row, end = layer_g[0] * shape.layer_rows, kv_len_g[jnp.minimum(tile.sequence, S - 1)]
                return fetch(shape, memory, k_g, v_g, table_g, tile, head, layer_row, first, last, count, slots, end)

            drain(memory, lax.fori_loop(0, trips, one_item, jnp.int32(0)), slots)

        @pl.when(wg < pairs)
        def _consumer():
            plgpu.set_max_registers(232, action="increase")

            def copy(i):
                tile, _, _, head = item(i)
                copy_q(shape, q_g, q_memory, q_ready.at[pair], pair, tile.token, head, tile.tokens)

            @pl.when(trips > 0)
            def _first_q():
                clear_q(q_memory, pair)
                copy(jnp.int32(0))

            def one_item(i, count):
                tile, first, last, head = item(i)
                limit = tile.tokens * shape.G
                here = tile.token, head * shape.G, limit, shape.G
                opened = lax.rem(first, shape.per_split) > 0
                begun = load_open(begun_g, d, opened, *here) if phase is Phase.OWN else None
                plgpu.barrier_wait(q_ready.at[pair])

                def next_q():
                    @pl.when(i + 1 < trips)
                    def _():
                        copy(i + 1)

                def write(total: Total):
                    if not parts:
                        o_Md, lse_M = finish(total)
                        hopper_rows.store(result_g[0], o_Md, *here)
                        hopper_rows.store(result_g[1], lse_M, *here)
                        return
                    where = lax.div(first, shape.per_split) * T + tile.token, *here[1:]
                    o_pg, m_pg, l_pg = parts_g
                    for c in range(d // WIDTH):
                        hopper_rows.store(o_pg.at[c], total.o_Md[:, c * WIDTH : (c + 1) * WIDTH], *where)
                    hopper_rows.store(m_pg, total.m_M, *where)
                    hopper_rows.store(l_pg, total.l_M, *where)

                def attend():
                    kv_len = kv_len_g[tile.sequence]
                    turns = Turns(None, 0, 1)
                    total, split, after = walk(
                        shape, memory, turns, tile, 0, kv_len, first, last, count, plan, None, next_q, begun
                    )
                    if phase is not Phase.SHARED:
                        write(total)
                        return after
                    stays_open = lax.rem(last, shape.per_split) > 0

                    @pl.when(stays_open)
                    def _():
                        for ref, x in zip(begun_g, split, strict=True):
                            hopper_rows.store(ref, x, *here)

                    if parts:
                        pl.when(~stays_open)(lambda: write(total))
                    return after

                def nothing():
                    write(Total(full(NEVER, (ROWS,)), full(0, (ROWS,)), full(0, (ROWS, d))))
                    next_q()
                    return count

                return attend() if phase is Phase.SHARED else lax.cond(last > first, attend, nothing)

            lax.fori_loop(0, trips, one_item, jnp.int32(0))

    outputs = mosaic.kernel(
        body,
        out_type=out_type,
        scratch_types=dict(
            scratch=[
                q_scratch(shape, pairs, one=True),
                plgpu.SMEM((pairs, slots, shape.block, d), jnp.bfloat16, transforms=mosaic.TILED),
                plgpu.Barrier(num_arrivals=shape.pieces, num_barriers=pairs * slots),
                plgpu.Barrier(num_barriers=pairs * slots),
                plgpu.Barrier(num_arrivals=d // 64, num_barriers=pairs),
            ]
        ),
        grid=(mosaic.SMS,),
        grid_names=("cta",),
        num_threads=2 * pairs,
        thread_name="wg",
        compiler_params=LANES,
    )(q_THd, k_Rd, v_Rd, kv_len_S, table_SP, layer, items_LM7, count_L, *given)
    return [ref[...] for ref in refs] if phase is Phase.OWN and parts else outputs


def load_open(refs, d: int, some, token, head, limit, G: int) -> Open:
    """The open split of a tile's rows, out of fp32 [T, H], [T, H, 8] and [T, H, d]; an empty one unless `some`."""
    here = token, head, jnp.where(some, limit, 0), G
    m_M, l_M8, o_Md = (
        hopper_rows.load(ref, shape, *here)
        for ref, shape in zip(refs, ((ROWS,), (ROWS, COLUMNS), (ROWS, d)), strict=True)
    )
    return Open(jnp.where(some, m_M, full(NEVER, (ROWS,))), l_M8, o_Md)


def merge_splits(o_CRHw, m_RH, l_RH, table_N5, count, shape: Shape, T: int):
    """(o [T, H, d], log-sum-exp [T, H]): the splits of each row merged in order.

    Args:
      o_CRHw: fp32 [d / 32, splits * T, H, 32], O of token t and split s in row s * T + t.
      m_RH, l_RH: fp32 [splits * T, H].
      table_N5, count: int32 [N, 5] and [1], tiles of up to 64 / H tokens: a tile's rows are (token, query head), of all groups.
      shape: static sizes.
      T: how many tokens there are.
    """
    C, _, H, w = o_CRHw.shape
    heads = min(H, ROWS)

    def body(o_pg, m_pg, l_pg, tiles_g, count_g, o_g, lse_g):
        mosaic.after_last_kernel()
        n, block, c = lax.axis_index("tile"), lax.axis_index("heads"), lax.axis_index("column")

        @pl.when(n < count_g[0])
        def _merge():
            tile = Tile(*(tiles_g[n, j] for j in range(5)))
            head = block * heads
            limit = tile.tokens * jnp.minimum(H - head, heads)
            last = lax.div(tile.blocks + (shape.per_split - 1), shape.per_split)
            here = (tile.token, head, limit, heads)
            row_M = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
            position_M = lax.div(row_M, heads) + tile.position

            def part(split) -> Total:
                there = (split * T + tile.token, head, jnp.where(split < last, limit, 0), heads)
                o_Mw = hopper_rows.load(o_pg.at[c], (ROWS, w), *there)
                m_M, l_M = (hopper_rows.load(ref, (ROWS,), *there) for ref in (m_pg, l_pg))
                # Rows that see nothing of a split may have been in tiles that did not compute it.
                return Total(m_M, jnp.where(position_M >= split * shape.split, l_M, 0), o_Mw)

            def some(i, total):
                for p in [part(i * AT_ONCE + j) for j in range(AT_ONCE)]:
                    total = merge(total, p)
                return total

            empty = Total(full(NEVER, (ROWS,)), full(0, (ROWS,)), full(0, (ROWS, w)))
            o_Mw, lse_M = finish(lax.fori_loop(0, lax.div(last + (AT_ONCE - 1), AT_ONCE), some, empty))
            hopper_rows.store(o_g.at[:, :, pl.ds(c * w, w)], o_Mw, *here)

            @pl.when(c == 0)
            def _():
                hopper_rows.store(lse_g, lse_M, *here)

    return mosaic.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((T, H, C * w), jnp.bfloat16), jax.ShapeDtypeStruct((T, H), jnp.float32)],
        grid=(table_N5.shape[0], -(-H // heads), C),
        grid_names=("tile", "heads", "column"),
        compiler_params=LANES,
    )(o_CRHw, m_RH, l_RH, table_N5, count)
