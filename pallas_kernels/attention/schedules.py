"""Which schedule serves a head_dim, in the kernel of many rows and in that of few. None reaches the bits.

`python -m benchmarks.kernels.tune_attention` measures the candidates on a GPU, refuses one whose bits differ, and rewrites
the tables.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention import kv_block
from pallas_kernels.attention.hopper_tiles import ROWS

PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}
CONSUMER_REGISTERS = {1: 232, 2: 240, 3: 160}
"""A thread's, by warpgroups that compute: with one warpgroup that fetches they share 65,536."""
SHARED_BYTES = 224 * 1024
"""Shared memory of one program, less 3 KB for barriers and for Mosaic."""


@dataclasses.dataclass(frozen=True)
class Many:
    """The kernel of many rows."""

    warpgroups: int  # that compute, on one tile's K and V
    slots: int  # K or V blocks in shared memory
    overlap: bool  # scores of the next block and P V of this one in flight together; the ring has that K before this V
    park_in_shared: bool  # the merged O of earlier splits; otherwise in global memory
    turns: bool = True  # warpgroups take turns on the tensor core

    def shared_bytes(self, d: int, block: int | None = None) -> int:
        """Of q, K, V and the parked O; block: another KV block than the contract's."""
        parked = self.warpgroups * ROWS * d * 4 if self.park_in_shared else 0
        return self.warpgroups * ROWS * d * 2 + self.slots * (block or kv_block(d)) * d * 2 + parked


@dataclasses.dataclass(frozen=True)
class Few:
    """The kernel of few rows."""

    pairs: int  # of a warpgroup that fetches and one that computes, each pair with items of its own
    slots: int  # K or V blocks of one pair in shared memory
    overlap: bool  # scores of the next block and P V of this one in flight together

    def shared_bytes(self, d: int, block: int | None = None) -> int:
        """Of q, K and V; block: another KV block than the contract's."""
        return self.pairs * (ROWS * d * 2 + self.slots * (block or kv_block(d)) * d * 2)


MANY = {
    64: Many(warpgroups=3, slots=8, overlap=True, park_in_shared=True, turns=True),
    128: Many(warpgroups=2, slots=4, overlap=True, park_in_shared=True, turns=True),
    256: Many(warpgroups=2, slots=5, overlap=True, park_in_shared=False, turns=True),
}
"""By head_dim."""
FEW = {
    64: Few(pairs=2, slots=6, overlap=True),
    128: Few(pairs=2, slots=3, overlap=True),
    256: Few(pairs=1, slots=6, overlap=True),
}
"""By head_dim."""
