"""The walk of one warpgroup over KV blocks, shared by the kernels of many rows and of few: where blocks come from, who
multiplies when, and in which order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.attention import hopper_scores
from pallas_kernels.attention.hopper_softmax import COLUMNS, Total, add, full, softmax
from pallas_kernels.attention.hopper_tiles import ROWS, Shape, Tile
from pallas_kernels.attention.reference import NEVER, softmax_scale

LANES = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
"""Layouts as written here, not inferred."""


class Open(NamedTuple):
    """A split whose first blocks are done: what the next one goes on with."""

    m_M: jax.Array
    l_M8: jax.Array  # running sum of P, in 8 columns
    o_Md: jax.Array

    def total(self) -> Total:
        """The split as one to merge, if it ends here."""
        return Total(self.m_M, self.l_M8.sum(axis=1), self.o_Md)


class State(NamedTuple):
    """What one warpgroup carries from block to block: the open split, and what else than O there is of those before it."""

    m_M: jax.Array
    l_M8: jax.Array
    p_MB: jax.Array  # P of the last block, not yet multiplied by V
    o_Md: jax.Array
    before_m_M: jax.Array
    before_l_M: jax.Array

    def split(self) -> Open:
        """The open split."""
        return Open(self.m_M, self.l_M8, self.o_Md)


class Memory(NamedTuple):
    """Shared memory and barriers of one warpgroup's walk, and where its K and V blocks come from."""

    q_s: jax.Array  # [d / 64, 64, 64]
    ring_s: jax.Array  # [slots, block, d]: K and V blocks, in turn
    ready: jax.Array
    free: jax.Array
    barrier0: jax.Array | int = 0  # barriers of slot i are number barrier0 + i
    cleared: jax.Array | None = None  # of the warpgroups that share the ring, where there are several
    sharers: int = 1
    me: jax.Array | int = 0  # which of them
    keys_ahead: bool = False  # the ring has K of a block before V of the one before it, as scores run ahead


def fetch(
    shape: Shape, memory: Memory, k_g, v_g, table_g, tile: Tile, head, first_row, first, last, count, slots: int, end=None
):
    """The producer's part of a walk: blocks [first, last) of a tile's sequence into the ring; returns the new count.

    Pages that begin at position `end` or later stay unread, and their rows of the ring as they are: at short lengths the rest
    of the last block is much of what is read. Not with keys ahead.
    """

    def places(b):
        """Where the pieces of block b begin."""
        if shape.page > shape.block:
            of_page = shape.page // shape.block
            page = table_g[tile.sequence, lax.div(b, of_page)]
            return (page * shape.page + lax.rem(b, of_page) * shape.block + first_row,)
        return tuple(table_g[tile.sequence, b * shape.pieces + i] * shape.page + first_row for i in range(shape.pieces))

    def copy(source, rows, count, needed=None):
        """The first `needed` positions of a block, in whole pieces; of all pieces None."""
        slot = lax.rem(count, slots)
        ready = memory.ready.at[memory.barrier0 + slot]

        @pl.when(count >= slots)
        def _wait():
            plgpu.barrier_wait(memory.free.at[memory.barrier0 + slot])

        for i, row in enumerate(rows):

            def piece(i=i, row=row):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, shape.piece), pl.ds(head * shape.d, shape.d)],
                    memory.ring_s.at[slot, pl.ds(i * shape.piece, shape.piece)],
                    ready,
                )

            if needed is None or i == 0:
                piece()
            else:
                lax.cond(i * shape.piece < needed, piece, lambda: plgpu.barrier_arrive(ready))
        return count + 1

    def one_block(b, count):
        rows, needed = places(b), None if end is None else end - b * shape.block
        return copy(v_g, rows, copy(k_g, rows, count, needed), needed)

    def keys_ahead(b, carry):
        count, before = carry
        rows = places(b)
        return copy(v_g, before, copy(k_g, rows, count)), rows

    def some():
        rows = places(first)
        after, rows = lax.fori_loop(first + 1, last, keys_ahead, (copy(k_g, rows, count), rows))
        return copy(v_g, rows, after)

    if memory.keys_ahead:
        return lax.cond(last > first, some, lambda: count)
    return lax.fori_loop(first, last, one_block, count)


def drain(memory: Memory, count, slots: int) -> None:
    """The producer waits until the blocks that it fetched are done with: a program ends with its barriers at rest."""
    for i in range(slots):

        @pl.when(count + i >= slots)
        def _wait(i=i):
            plgpu.barrier_wait(memory.free.at[memory.barrier0 + lax.rem(count + i, slots)])


def stay(l_M8) -> None:
    """Keeps the sum of P, and all that it is computed from, before what follows: ptxas moves arithmetic past a wait for wgmma.

    A store that never happens, as sums are not negative, depends on them; ptxas leaves stores where they are.
    """

    if mosaic.interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def emit(_, l_M8):
        columns = [
            vector.extract(r, dynamic_position=[], static_position=[i]) for r in l_M8.registers.flat for i in (0, 1)
        ]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [functools.reduce(arith.addf, columns)],
            "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.volatile.shared.f32 [a], $0; }",
            "f",
            has_side_effects=True,
        )

    emit(l_M8)


class Plain:
    """An accumulator of the interpreter, which cannot multiply from registers: a value, complete at once."""

    def __init__(self, shape: tuple[int, int]):
        self.value = jnp.zeros(shape, jnp.float32)

    def __getitem__(self, _):
        return self.value

    def __setitem__(self, _, value):
        self.value = value


def accumulate(f, *shapes: tuple[int, int]):
    """f of fp32 accumulators of these shapes; its result."""
    if mosaic.interpreting():
        return f(*map(Plain, shapes))
    return pl.run_scoped(f, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def multiply(acc, a, b, transposed: bool = False) -> None:
    """Issues acc += a b, or a b^T; a in shared memory or in registers, b in shared memory."""
    if isinstance(acc, Plain):
        a_MK = a[...].reshape(-1, a.shape[-1])
        a_MK = jnp.pad(a_MK, ((0, acc.value.shape[0] - a_MK.shape[0]), (0, 0)))  # groups that do not fill 64 rows
        dims = (((1,), (int(transposed),)), ((), ()))
        acc.value = acc.value + lax.dot_general(a_MK, b[...], dims, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # these reads are not a wgmma's
    else:
        plgpu.wgmma(acc, a, b.transpose((1, 0)) if transposed else b)


def result(acc):
    """The accumulator's value, once all products are complete."""
    return mosaic.here(acc[...])


FIRST_TURN = 8
"""Of the hardware's barriers, 16 a program, the first that serves turns; Mosaic's own are those up to the warpgroups' number."""


class Turns:
    """Whose turn it is on the tensor core; of one warpgroup, nobody's.

    The hardware's barriers, as they wake a warpgroup sooner than those in shared memory, which the interpreter takes.
    """

    def __init__(self, barrier, me, of: int):
        self.barrier, self.me, self.of = barrier, me, of

    def open(self):
        """The last warpgroup lets the first one begin."""
        if self.of > 1:

            @pl.when(self.me == self.of - 1)
            def _():
                self.give()

    def close(self):
        """The first warpgroup takes the turn that the last one gave at its end."""
        if self.of > 1:

            @pl.when(self.me == 0)
            def _():
                self.take()

    def take(self):
        if self.of > 1 and mosaic.interpreting():
            plgpu.barrier_wait(self.barrier.at[self.me])
        elif self.of > 1:
            mosaic.named_barrier("sync", FIRST_TURN + self.me)

    def give(self):
        if self.of > 1:
            following = lax.rem(self.me + 1, self.of)
            if mosaic.interpreting():
                plgpu.barrier_arrive(self.barrier.at[following])
            else:
                mosaic.named_barrier("arrive", FIRST_TURN + following)


class Scores:
    """S = q k^T of one block, issued at once; `result` when it is complete."""

    def __init__(self, shape: Shape, memory: Memory, slot):
        chunks = range(shape.d // 64)
        q = [memory.q_s.at[c] for c in chunks]
        k = [memory.ring_s.at[slot, :, pl.ds(64 * c, 64)] for c in chunks]
        if mosaic.interpreting():
            self.acc = Plain((ROWS, shape.block))
            for a, b in zip(q, k, strict=True):
                multiply(self.acc, a, b, transposed=True)
        else:
            self.value = hopper_scores.issue(q, k)

    def result(self, in_flight: int = 0):
        """Scores, once all but the newest `in_flight` products are complete."""
        if mosaic.interpreting():
            return result(self.acc)
        plgpu.wgmma_wait(in_flight)
        return hopper_scores.landed(self.value)


def clear_unwritten(shape: Shape, memory: Memory, slot, kv_len_in_block) -> None:
    """Zeros in V's rows past the sequence: P is zero there, but 0 x NaN is NaN. Each warpgroup that shares V clears a part."""
    places = [(r, c) for r in range(0, shape.block, 64) for c in range(0, shape.d, 64)]
    for i, (r, c) in enumerate(places):

        @pl.when(memory.me == i % memory.sharers)
        def _clear(r=r, c=c):
            part = memory.ring_s.at[slot, pl.ds(r, 64), pl.ds(c, 64)]
            row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA) + r
            part[...] = jnp.where(row < kv_len_in_block, part[...], full(0, (64, 64), jnp.bfloat16))

    plgpu.commit_smem()
    if memory.sharers > 1:
        plgpu.barrier_arrive(memory.cleared)
        plgpu.barrier_wait(memory.cleared)


def walk(
    shape: Shape, memory: Memory, turns: Turns, tile: Tile, token0, kv_len, first, last, count, plan, park, next_q, begun=None
):
    """(blocks [first, last) of one warpgroup's rows, merged; the last split of them by itself; the new count).

    Args:
      token0: of the tile's tokens, the warpgroup's first.
      kv_len: of the tile's sequence.
      first, last: blocks; first < last, and first begins a split unless `begun` is given.
      count: blocks that the ring has seen, K and V apart.
      plan: slots and overlap of a schedule.
      park: fp32 [64, d], where O of the splits before the open one rests; None if all blocks are of one split.
      next_q: called when q is done with.
      begun: an `Open`, the split that block `first` belongs to, as the blocks before left it; None for one without any, and with `park`.
    """
    scale, d, block, per_split = softmax_scale(shape.d), shape.d, shape.block, shape.per_split
    o_shape = (ROWS, d)

    def slot_of(count):
        return lax.rem(count, plan.slots)

    def ahead(b):
        return tile.position + token0 - b * block

    def parked(state: State) -> Total:
        before = Total(
            state.before_m_M,
            state.before_l_M,
            plgpu.load(park, layout=plgpu.Layout.WGMMA, optimized=plan.park_in_shared),
        )
        return add(before, state.split().total())

    def first_scores():
        plgpu.barrier_wait(memory.ready.at[memory.barrier0 + slot_of(count)])
        turns.take()
        scores = Scores(shape, memory, slot_of(count))
        turns.give()
        return scores.result()

    def one_block(b, carry, masked: bool):
        count, state = carry
        # Of block b - 1 the ring holds V, and K of block b.
        v_slot, k_slot = slot_of(count + 1), slot_of(count + 2)
        if memory.keys_ahead:
            v_slot, k_slot = k_slot, v_slot
        m_M, l_M8 = state.m_M, state.l_M8
        if park is not None:
            new_split = lax.rem(b, per_split) == 0
            m_M = jnp.where(new_split, full(NEVER, (ROWS,)), m_M)
            l_M8 = jnp.where(new_split, full(0, (ROWS, COLUMNS)), l_M8)

        def soft(s_MB):
            return softmax(hopper_scores.hide(s_MB, shape.G, ahead(b)) if masked else s_MB, m_M, l_M8, scale)

        def together(o_acc):
            o_acc[...] = state.o_Md
            plgpu.barrier_wait(memory.ready.at[memory.barrier0 + k_slot])
            turns.take()
            scores = Scores(shape, memory, k_slot)
            plgpu.barrier_wait(memory.ready.at[memory.barrier0 + v_slot])
            # The turn is given with half of P V still to be issued, so that the next warpgroup is awake when that has run.
            # That is the whole of a block of 64 keys, which cannot be halved: V lies in tiles of 64 rows.
            parts = block // 64 if turns.of > 1 else 1
            for i in range(parts):
                if i == parts // 2:
                    turns.give()
                keys = slice(i * block // parts, (i + 1) * block // parts)
                multiply(o_acc, state.p_MB[:, keys], memory.ring_s.at[v_slot, keys])
            s_MB = scores.result(in_flight=parts)
            plgpu.barrier_arrive(memory.free.at[memory.barrier0 + k_slot])
            # The softmax belongs here, beside P V in flight; that product still reads the old P, so the new one takes its
            # registers after it.
            after = lax.optimization_barrier(soft(s_MB))
            stay(after[2])
            o_Md = result(o_acc)
            plgpu.barrier_arrive(memory.free.at[memory.barrier0 + v_slot])
            return o_Md, after

        def product(o_acc):
            o_acc[...] = state.o_Md
            plgpu.barrier_wait(memory.ready.at[memory.barrier0 + v_slot])
            turns.take()
            multiply(o_acc, state.p_MB, memory.ring_s.at[v_slot])
            return result(o_acc)

        def next_scores():
            plgpu.barrier_wait(memory.ready.at[memory.barrier0 + k_slot])
            scores = Scores(shape, memory, k_slot)
            turns.give()
            return scores.result()

        if plan.overlap:
            o_Md, after = accumulate(together, o_shape)
        else:
            o_Md = accumulate(product, o_shape)
            plgpu.barrier_arrive(memory.free.at[memory.barrier0 + v_slot])
            s_MB = next_scores()
            plgpu.barrier_arrive(memory.free.at[memory.barrier0 + k_slot])
            after = soft(s_MB)
        m_M, alpha_M, l_M8, p_MB = after
        p_MB = p_MB.astype(jnp.bfloat16)
        before = (state.before_m_M, state.before_l_M)

        def rescaled():
            return mosaic.mul(o_Md, mosaic.rows(alpha_M, (ROWS, d))), *before

        def begin_split():
            total = parked(state._replace(o_Md=o_Md))
            park[...] = total.o_Md
            return full(0, (ROWS, d)), total.m_M, total.l_M

        o_Md, *before = rescaled() if park is None else lax.cond(new_split, begin_split, rescaled)
        return count + 2, State(m_M, l_M8, p_MB, o_Md, *before)

    if park is not None:

        @pl.when(last - first > per_split)
        def _nothing_before():
            park[...] = full(0, o_shape)

    s_MB = first_scores()
    plgpu.barrier_arrive(memory.free.at[memory.barrier0 + slot_of(count)])
    s_MB = lax.cond(ahead(first) >= block - 1, lambda: s_MB, lambda: hopper_scores.hide(s_MB, shape.G, ahead(first)))
    never_M = full(NEVER, (ROWS,))
    m_M, l_M8 = (never_M, full(0, (ROWS, COLUMNS))) if begun is None else begun[:2]
    m_M, alpha_M, l_M8, p_MB = softmax(s_MB, m_M, l_M8, scale)
    o_Md = full(0, o_shape) if begun is None else mosaic.mul(begun.o_Md, mosaic.rows(alpha_M, o_shape))
    state = State(m_M, l_M8, p_MB.astype(jnp.bfloat16), o_Md, never_M, full(0, (ROWS,)))
    # Blocks that every row of the tile sees need no mask.
    unmasked = jnp.clip(lax.div(tile.position + 1, block), first + 1, last)
    carry = lax.fori_loop(first + 1, unmasked, functools.partial(one_block, masked=False), (count, state))
    count, state = lax.fori_loop(unmasked, last, functools.partial(one_block, masked=True), carry)
    next_q()

    slot = slot_of(count + 1)
    plgpu.barrier_wait(memory.ready.at[memory.barrier0 + slot])

    @pl.when(kv_len < last * block)
    def _unwritten():
        clear_unwritten(shape, memory, slot, kv_len - (last - 1) * block)

    def last_product(o_acc):
        o_acc[...] = state.o_Md
        multiply(o_acc, state.p_MB, memory.ring_s.at[slot])
        return result(o_acc)

    state = state._replace(o_Md=accumulate(last_product, o_shape))
    plgpu.barrier_arrive(memory.free.at[memory.barrier0 + slot])
    split = state.split()
    total = split.total()
    if park is not None:
        total = Total(*lax.cond(last - first > per_split, lambda: tuple(parked(state)), lambda: tuple(total)))
    return total, split, count + 2


def q_scratch(shape: Shape, warpgroups: int, one: bool = False):
    """Shared memory of the q tiles, in several views: as a wgmma sees them, [warpgroups, d / 64, 64, 64]; as a copy of a whole
    tile does, for each warpgroup and 64 columns [tokens, G, 64], which are the first rows of the 64; and where `one`, as a copy
    of a single token does."""
    chunks = shape.d // 64
    if mosaic.interpreting():  # where two views are two buffers
        return [plgpu.SMEM((warpgroups, chunks, ROWS // shape.G, shape.G, 64), jnp.bfloat16)]

    def of(tokens: int):
        part = plgpu.SMEM((tokens, shape.G, 64), jnp.bfloat16, transforms=(plgpu.SwizzleTransform(128),))
        gap = ROWS * 64 - -(-tokens * shape.G // 8) * 8 * 64  # parts are aligned to 8 rows
        return [[[part, plgpu.SMEM((gap,), jnp.bfloat16)] if gap else [part] for _ in range(chunks)] for _ in range(warpgroups)]

    whole = plgpu.SMEM((warpgroups, chunks, ROWS, 64), jnp.bfloat16, transforms=mosaic.TILED)
    return plgpu.RefUnion(whole, of(shape.tokens), *([of(1)] if one else []))


def clear_q(q_scratch, me) -> None:
    """Zeros in all rows of warpgroup `me`: those that no query fills cost the tensor core less power than what lay there."""
    q_s = q_scratch[0].at[me]
    if mosaic.interpreting():
        return
    for c in range(q_s.shape[0]):
        part = q_s.at[c]
        part[...] = full(0, (ROWS, 64), jnp.bfloat16)
    plgpu.commit_smem()


def copy_q(shape: Shape, q_g, q_scratch, barrier, me, token, head, tokens=None) -> None:
    """Starts the copy of rows of q from `token` on to the memory of warpgroup `me`: of 64, or of one token where `tokens` is 1.

    A tile of decode has one token, 4 rows of 64: the others' copies would be an eighth of what the multiprocessor reads.
    """
    q_s, *views = q_scratch
    if mosaic.interpreting():
        views = [[[[q_s.at[w, c]] for c in range(q_s.shape[1])] for w in range(q_s.shape[0])]]
        views += [[[[q_s.at[w, c, pl.ds(0, 1)]] for c in range(q_s.shape[1])] for w in range(q_s.shape[0])]]

    def copy(view, w: int, count: int):
        for c, (part, *_) in enumerate(view[w]):
            at = (pl.ds(token, count), pl.ds(head * shape.G, shape.G), pl.ds(64 * c, 64))
            plgpu.copy_gmem_to_smem(q_g.at[at], part, barrier)

    for w in range(q_s.shape[0]):

        @pl.when(me == w)
        def _copy(w=w):
            if tokens is None:
                copy(views[0], w, shape.tokens)
            else:
                lax.cond(tokens == 1, lambda: copy(views[1], w, 1), lambda: copy(views[0], w, shape.tokens))
