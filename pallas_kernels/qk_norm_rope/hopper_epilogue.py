"""Norm, rotation and places of heads out of a GEMM's accumulators, whose rows are weights: no launch of its own for them.

A consumer warpgroup holds 64 rows of [weights, tokens]: a head of 64, or a part of a larger one. It rounds them as the GEMM
does and turns them in shared memory, where the warpgroups of a head then share out its tokens. From there on a head of a token
is read as the kernel of its own reads it (`hopper_layout.row_layout`) and treated by the same function: the bits of two
kernels. Results leave from registers: queries to their rows, keys and values to their pages.

What does not depend on the sums, rotations, norms and places, is loaded before the first of them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import row_stream
from pallas_kernels.gemm.hopper_small import WGMMA_ROWS, Epilogue, Schedule
from pallas_kernels.qk_norm_rope import hopper_pages
from pallas_kernels.qk_norm_rope.hopper_layout import row_layout, tile_rows
from pallas_kernels.qk_norm_rope.hopper_turn import turn
from pallas_kernels.weight import Weight


class Begun(NamedTuple):
    """What a warpgroup needs of its tokens, in registers.

    Attributes:
      weights: of queries' norm and of keys', halves [h]; () for no norm.
      rotations: cos and sin of each of its groups of `Heads.tokens` tokens.
      rows: of each group the tokens' rows of q, and of the pages; -1 for one that has none.
    """

    weights: tuple
    rotations: tuple
    rows: tuple


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of a fused projection, and where they go.

    Attributes:
      K, groups, d: KV heads, query heads of each, length of a head (64, 128 or 256).
      T: tokens that are real.
      eps: added to the mean square.
      layer_rows: rows of pages in a layer.
    """

    K: int
    groups: int
    d: int
    T: int
    eps: float
    layer_rows: int

    @property
    def h(self) -> int:
        """Half a head."""
        return self.d // 2

    @property
    def warpgroups(self) -> int:
        """That hold one head together."""
        return self.d // WGMMA_ROWS

    @property
    def layout(self):
        """Of half a head of a group of tokens."""
        return row_layout(self.h)

    @property
    def tokens(self) -> int:
        """That a warpgroup treats at once."""
        return tile_rows(self.h)

    def turns(self, s: Schedule) -> int:
        """Groups of tokens of each warpgroup; past a program's own, there is nothing in them."""
        return -(-s.tokens // (self.tokens * self.warpgroups))

    def staged(self, s: Schedule) -> tuple[int, int, int]:
        """Shape of a program's heads in shared memory, [heads, tokens, d]."""
        return s.rows // self.d, self.turns(s) * self.tokens * self.warpgroups, self.d

    def scratch(self, s: Schedule) -> tuple:
        """(a program's heads, barriers: all of a head is written, all of it is read)."""
        width = min(self.h, WGMMA_ROWS)
        transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
        barrier = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=s.rows // self.d)
        return plgpu.SMEM(self.staged(s), jnp.bfloat16, transforms=transforms), barrier, barrier

    def smem_bytes(self, s: Schedule) -> int:
        """Of `scratch`, barriers apart."""
        heads, tokens, d = self.staged(s)
        return heads * tokens * d * 2

    def first(self, i: int, wg: jax.Array) -> jax.Array:
        """The first token, in its program, of a warpgroup's group i."""
        return (i * self.warpgroups + lax.rem(wg, self.warpgroups)) * self.tokens

    def begin(self, s: Schedule, norms: tuple, rotations_g, slots_g, layer_g, first_token, wg) -> Begun:
        """Loads what belongs to a warpgroup's tokens.

        Args:
          norms: () or refs of queries' norm weight and keys', each (ref, index in its stack or nothing): [d] or [L, d].
          rotations_g: bf16 [T * 2 * h], cos and sin of each token.
          slots_g: int32 [T], places in a layer's pages.
          layer_g: int32 [1].
          first_token: of the program.
          wg: consumer warpgroup of the program.
        """
        h, layout = self.h, self.layout
        per_row = layout.reduce(1)
        column_Mh = plgpu.broadcasted_iota(jnp.int32, (self.tokens, h), 1, layout=layout)
        # A warp waits where it first uses what it loads: loads that others depend on come first, and those last.
        layer, stacks = layer_g[0], [(w, tuple(ref[0] for ref in index)) for w, *index in norms]
        rotations, places = [], []
        for i in range(self.turns(s)):
            at_M = plgpu.broadcasted_iota(jnp.int32, (self.tokens,), 0, layout=per_row) + self.first(i, wg)
            token_M = at_M + first_token
            real_M = (at_M < s.tokens) & (token_M < self.T)
            within_M = jnp.minimum(token_M, self.T - 1)
            offset_Mh = row_stream.spread(within_M * self.d, (self.tokens, h), (0,), layout) + column_Mh
            rotations.append(tuple(hopper_pages.load(rotations_g, offset_Mh + part * h, layout) for part in range(2)))
            places.append((real_M, token_M, hopper_pages.load(slots_g, within_M, per_row)))
        of_half = lambda w, index, i: w.at[(*index, pl.ds(i * h, h))]  # noqa: E731
        read = lambda ref: plgpu.load(ref, layout=layout.reduce(0), optimized=False)  # noqa: E731
        weights = tuple(tuple(read(of_half(w, index, i)) for i in range(2)) for w, index in stacks)
        rows = []
        for real_M, token_M, slot_M in places:
            page_M = jnp.where(real_M & (slot_M < self.layer_rows), slot_M + layer * self.layer_rows, -1)
            rows.append((jnp.where(real_M, token_M, -1), page_M))
        return Begun(weights, tuple(rotations), tuple(rows))

    def end(self, s: Schedule, begun: Begun, y_NT, row, wg, q_g, k_g, v_g, scratch) -> None:
        """Norms, rotates and stores the heads of one tile.

        Args:
          y_NT: fp32 [64, tokens], one warpgroup's rows of the weight, in WGMMA.
          row: the first of them, of K (groups + 2) d; past the last one nothing is stored.
          wg: consumer warpgroup; all of a head call.
          q_g: [T, K groups d]; k_g, v_g: [rows of all layers' pages, K d].
          scratch: what `scratch` makes.
        """
        heads_s, written, read = scratch
        d, h, layout = self.d, self.h, self.layout
        mine = lax.div(wg, self.warpgroups)
        part = lax.rem(wg, self.warpgroups) * WGMMA_ROWS
        y_NT = plgpu.layout_cast(y_NT.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        heads_s.at[mine, pl.ds(0, s.tokens), pl.ds(part, WGMMA_ROWS)].transpose((1, 0))[...] = y_NT
        plgpu.barrier_arrive(written.at[mine])
        plgpu.barrier_wait(written.at[mine])
        head = lax.div(row, d)
        k = lax.div(head, self.groups + 2)
        g = head - k * (self.groups + 2)
        spread = lambda x, axis: row_stream.spread(x, (self.tokens, h), (axis,), layout)  # noqa: E731

        def store(to, column, page: int, weight=None, turned: bool = True):
            column_Mh = plgpu.broadcasted_iota(jnp.int32, (self.tokens, h), 1, layout=layout) + column
            weight = weight and tuple(spread(w, 1) for w in weight)
            for i, (rotation, rows) in enumerate(zip(begun.rotations, begun.rows, strict=True)):
                tokens = pl.ds(pl.multiple_of(self.first(i, wg), self.tokens), self.tokens)
                halves = tuple(
                    plgpu.load(heads_s.at[mine, tokens, pl.ds(j * h, h)], layout=layout, optimized=False) for j in range(2)
                )
                if turned:
                    halves = turn(*halves, *rotation, weight, self.eps, layout)
                for j, x_Mh in enumerate(halves):
                    hopper_pages.store(to, x_Mh, spread(rows[page], 0), column_Mh + j * h, layout)

        weights = begun.weights or (None, None)
        inside = k < self.K
        pl.when(inside & (g < self.groups))(lambda: store(q_g, (head - 2 * k) * d, 0, weights[0]))
        pl.when(inside & (g == self.groups))(lambda: store(k_g, k * d, 1, weights[1]))
        pl.when(inside & (g > self.groups))(lambda: store(v_g, k * d, 1, turned=False))
        # Its own threads, and others of the head, write there next.
        plgpu.barrier_arrive(read.at[mine])
        plgpu.barrier_wait(read.at[mine])


def epilogue(
    heads: Heads,
    s: Schedule,
    rotations_T2h: jax.Array,
    norms: tuple[Weight, ...],
    k_pages,
    v_pages,
    slots_T: jax.Array,
    layer: jax.Array,
) -> Epilogue:
    """Of the GEMM that makes these heads; its one output is q [T, K groups d].

    Args:
      rotations_T2h: bf16 [T, 2, h].
      norms: of queries and keys, or ().
      k_pages, v_pages: refs [rows of all layers, K d], bf16.
      slots_T: int32 [T].
      layer: int32 [1], of the pages.
    """
    stacks = [(w.value, *w.index()) for w in norms]
    operands = (rotations_T2h.reshape(-1), slots_T, layer, k_pages, v_pages)
    tree = jax.tree.structure(stacks)

    def begin(refs, first_token, wg):
        rotations_g, slots_g, layer_g = refs[:3]
        norms_g = jax.tree.unflatten(tree, refs[len(operands) : -1])
        return heads.begin(s, norms_g, rotations_g, slots_g, layer_g, first_token, wg)

    def end(begun, y_NT, row, wg, refs, scratch):
        heads.end(s, begun, y_NT, row, wg, refs[-1], *refs[3:5], scratch)

    return Epilogue(
        rows=heads.d,
        operands=(*operands, *jax.tree.leaves(stacks)),
        outputs=(jax.ShapeDtypeStruct((heads.T, heads.K * heads.groups * heads.d), jnp.bfloat16),),
        scratch=heads.scratch,
        smem_bytes=heads.smem_bytes,
        begin=begin,
        end=end,
    )
