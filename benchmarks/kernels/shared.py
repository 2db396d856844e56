"""Decode attention of samples that hold their prompt's pages together: each by itself, together always, and where that should pay.

`python -m benchmarks.kernels.shared` prints a line for each piece of work, microseconds of a layer in a loop over layers that is
one CUDA graph, as an engine's step is.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels import timing
from pallas_kernels import environment
from pallas_kernels.attention import hopper_decode, hopper_shared
from pallas_kernels.attention.hopper_tiles import Shape

H, K, D, PAGE = 32, 8, 128, 64
"""Qwen3-8B's heads."""
S, LAYERS, TRIPS = 256, 2, 50
SHARES = {"apart": None, "together": lambda *_: True, "where it pays": hopper_shared.pays}


@dataclasses.dataclass(frozen=True)
class Prompts:
    """`number` prompts of `shared` positions, `samples` of each with `own` positions more."""

    number: int
    samples: int
    shared: int
    own: int

    def where(self, width: int) -> tuple[jax.Array, ...]:
        """(q_start [S + 1], kv_len [S], page tables [S, width positions]); sequences that are not used come last."""
        whole, need = self.shared // PAGE, -(-(self.shared + self.own) // PAGE)
        used = self.number * self.samples
        table = np.zeros((S, width // PAGE), np.int32)
        pages = np.random.default_rng(0).permutation(self.pages)
        prompts, own = np.split(pages, [self.number * whole])
        table[:used, :whole] = np.repeat(prompts.reshape(self.number, whole), self.samples, axis=0)
        table[:used, whole:need] = own.reshape(used, need - whole)
        kv_len = np.where(np.arange(S) < used, self.shared + self.own, 0)
        return tuple(jnp.asarray(x, jnp.int32) for x in (np.minimum(np.arange(S + 1), used), kv_len, table))

    @property
    def pages(self) -> int:
        """Pages of all of them."""
        whole = self.shared // PAGE
        return self.number * (whole + self.samples * (-(-(self.shared + self.own) // PAGE) - whole))


WORK = {
    2560: (
        Prompts(16, 16, 2048, 256),
        Prompts(16, 16, 1984, 256),
        Prompts(4, 64, 512, 256),
        Prompts(1, 64, 2048, 256),
        Prompts(1, 16, 2048, 256),
        Prompts(256, 1, 0, 384),
    ),
    640: (Prompts(32, 8, 256, 128), Prompts(32, 8, 128, 256), Prompts(256, 1, 0, 384)),
}
"""By positions of a page table: up to 2048 all blocks are of one split."""


def loop(share, pages: int):
    """A function of (q, k, v, *where): TRIPS calls, whose lists are made once."""
    shape = Shape(H, K, D, PAGE, layer_rows=pages * PAGE)

    def run(q, k, v, *where):
        work = hopper_decode.work_list(*where, S, shape, share)

        def layer(i, q):
            return hopper_decode.attention(q, k, v, *where, lax.rem(i, LAYERS)[None], shape, work=work)[0]

        return lax.fori_loop(0, TRIPS, layer, q)

    return run


def measure() -> list[dict]:
    """One row a piece of work: its sizes, and microseconds of a layer by SHARES."""
    pages = max(prompts.pages for of_width in WORK.values() for prompts in of_width)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)  # noqa: E731
    q, k, v = draw(0, S, H, D), *(draw(i, LAYERS * pages * PAGE, K * D) for i in (1, 2))
    rows = []
    for width, of_width in WORK.items():
        args = {prompts: (q, k, v, *prompts.where(width)) for prompts in of_width}
        first = next(iter(args.values()))
        programs = {
            name: jax.jit(loop(share, pages)).lower(*first).compile(compiler_options=environment.one_graph())
            for name, share in SHARES.items()
        }
        for prompts in of_width:
            us = timing.in_turn_us({name: (program, args[prompts]) for name, program in programs.items()})
            row = {"width": width} | dataclasses.asdict(prompts)
            rows.append(row | {name: round(x / TRIPS, 1) for name, x in us.items()})
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    measure()
