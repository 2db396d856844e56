"""Which kernel and which schedule of the large one run, by shape: committed tables, no tuning at run time.

A schedule says how the work is cut and moved; no schedule reaches the bits (tests/gpu/test_gemm.py compares every one).
`python -m benchmarks.kernels.tune_gemm` measures the candidates on a GPU and rewrites the tables.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the large kernel cuts [T, N] into tiles, and how it moves operands.

    Attributes:
      tile_m, tile_n: rows and columns of one program's tile.
      split: "m" or "n", the side of the tile that the consumer warpgroups divide.
      steps: K-steps of 64 that fit in the ring of operands.
      cluster: programs along rows and columns of a cluster, which share what they load; 2 programs at most, as clusters of
        4 leave SMs idle.
      band: width of a band of tiles that is walked before the next one, in clusters.
      band_of: "m" or "n", the side that bands divide.
      in_flight: K-steps whose products a consumer leaves under way when it goes on: 0 or 1. With 0 nothing overlaps, where a
        leaf or a tile ends neither.
      in_shared: whether the sum of the first half of a tree of more than 4 leaves waits in shared memory. Else it waits in
        registers, as the sums below it do, and of 8 leaves a warpgroup's tile is 64 x 112 at most (64 x 128 with it).
      consumers: warpgroups that multiply.
    """

    tile_m: int
    tile_n: int
    split: str = "m"
    steps: int = 4
    cluster: tuple[int, int] = (1, 1)
    band: int = 8
    band_of: str = "m"
    in_flight: int = 1
    in_shared: bool = False
    consumers: ClassVar[int] = 2

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns of one consumer warpgroup."""
        if self.split == "m":
            return self.tile_m // self.consumers, self.tile_n
        return self.tile_m, self.tile_n // self.consumers


ROWS = (256, 512, 2048, 8192)
COLUMNS = (1024, 4096, 8192, 16384)
"""Upper ends of the tables' buckets; what is larger falls into the last."""

ONE_WAVE: tuple[tuple[range, Schedule], ...] = (
    (range(4225, 6337), Schedule(tile_m=128, tile_n=96, steps=7, cluster=(2, 1))),
    (range(8449, 12673), Schedule(tile_m=128, tile_n=192, steps=5, cluster=(2, 1))),
    (range(16897, 25345), Schedule(tile_m=128, tile_n=192, steps=5, cluster=(2, 1))),
)
"""Columns of a chain with a schedule of their own at 129 to 256 rows: its tiles are one or two waves of 132 programs, full by
two thirds at least. Comes before the other tables."""

LONG_TREE: int | None = 8192
LONG_TREE_ROWS = 2048
"""K above which a tree has the schedule of so many rows at most: half of it in shared memory costs less than narrower tiles."""

FEW = {
    ("chain", 1024): 256,
    ("chain", 4096): 256,
    ("chain", 8192): 256,
    ("chain", 16384): 128,
    ("tree", 1024): 256,
    ("tree", 4096): 128,
    ("tree", 8192): 128,
    ("tree", 16384): 128,
}
"""Rows up to which the kernel for few tokens serves."""

TABLE: dict[tuple[str, int, int], Schedule] = {
    ("chain", 256, 1024): Schedule(tile_m=128, tile_n=64, steps=8, cluster=(2, 1)),
    ("chain", 256, 4096): Schedule(tile_m=128, tile_n=64, steps=8, cluster=(2, 1)),
    ("chain", 256, 8192): Schedule(tile_m=128, tile_n=128, steps=6),
    ("chain", 256, 16384): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 512, 1024): Schedule(tile_m=128, tile_n=64, steps=8, cluster=(2, 1)),
    ("chain", 512, 4096): Schedule(tile_m=128, tile_n=128, steps=6),
    ("chain", 512, 8192): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 512, 16384): Schedule(tile_m=128, tile_n=256),
    ("chain", 2048, 1024): Schedule(tile_m=128, tile_n=128, steps=6),
    ("chain", 2048, 4096): Schedule(tile_m=128, tile_n=256),
    ("chain", 2048, 8192): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 2048, 16384): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 8192, 1024): Schedule(tile_m=128, tile_n=256),
    ("chain", 8192, 4096): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 8192, 8192): Schedule(tile_m=128, tile_n=256, cluster=(2, 1)),
    ("chain", 8192, 16384): Schedule(tile_m=256, tile_n=192, steps=3, cluster=(1, 2)),
    ("tree", 256, 1024): Schedule(tile_m=128, tile_n=64, steps=8),
    ("tree", 256, 4096): Schedule(tile_m=128, tile_n=64, steps=8),
    ("tree", 256, 8192): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 256, 16384): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 512, 1024): Schedule(tile_m=128, tile_n=64, steps=8),
    ("tree", 512, 4096): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 512, 8192): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 512, 16384): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 2048, 1024): Schedule(tile_m=128, tile_n=128, steps=5, band_of='n', in_shared=True),
    ("tree", 2048, 4096): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 2048, 8192): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 2048, 16384): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 8192, 1024): Schedule(tile_m=128, tile_n=128, steps=5, band_of='n', in_shared=True),
    ("tree", 8192, 4096): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 8192, 8192): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
    ("tree", 8192, 16384): Schedule(tile_m=128, tile_n=128, steps=5, in_shared=True),
}


def every(order: str) -> list[Schedule]:
    """All schedules of the large kernel for "chain" or "tree"."""
    found = {s for (of, *_), s in TABLE.items() if of == order} | (
        {s for _, s in ONE_WAVE} if order == "chain" else set()
    )
    return sorted(found, key=repr)


def bucket(size: int, ends: tuple[int, ...]) -> int:
    """The upper end of the bucket that a size falls into."""
    return next((end for end in ends if size <= end), ends[-1])


def _order(leaves: int) -> str:
    return "chain" if leaves == 1 else "tree"


def _one_wave(T: int, N: int, leaves: int) -> Schedule | None:
    return next((s for columns, s in ONE_WAVE if leaves == 1 and 128 < T <= 256 and N in columns), None)


def is_few(T: int, N: int, leaves: int) -> bool:
    """Whether the kernel for few tokens serves x [T, K] w [N, K]^T in `leaves` leaves."""
    return T <= FEW[_order(leaves), bucket(N, COLUMNS)] and not _one_wave(T, N, leaves)


def large(T: int, N: int, K: int, leaves: int) -> Schedule:
    """The large kernel's schedule for x [T, K] w [N, K]^T in `leaves` leaves."""
    rows = min(T, LONG_TREE_ROWS) if leaves > 1 and LONG_TREE and K > LONG_TREE else T
    return _one_wave(T, N, leaves) or TABLE[_order(leaves), bucket(rows, ROWS), bucket(N, COLUMNS)]
