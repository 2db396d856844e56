"""Which schedule of the large kernel runs, by shape: a committed table, no tuning at run time.

A schedule says how the work is cut and moved; no schedule reaches the bits (tests/gpu/test_gemm.py compares every one).
`python -m benchmarks.kernels.tune_gemm` measures the candidates on a GPU and rewrites TABLE.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the large kernel cuts [T, N] into tiles, and how it moves operands.

    Attributes:
      tile_m, tile_n: rows and columns of one program's tile.
      split: "m" or "n", the side of the tile that the consumer warpgroups divide.
      consumers: warpgroups that multiply.
      steps: K-steps of 64 that fit in the ring of operands.
      cluster: programs along rows and columns of a cluster; its programs share what they load.
      band: width of a band of tiles that is walked before the next one, in clusters.
      band_of: "m" or "n", the side that bands divide.
      in_flight: K-steps whose products a consumer leaves under way when it goes on: 0 or 1.
      in_shared: levels of a tree whose partials wait in shared memory, above the lowest, which waits in registers; those
        above wait in global memory.
    """

    tile_m: int
    tile_n: int
    split: str = "m"
    consumers: int = 2
    steps: int = 4
    cluster: tuple[int, int] = (1, 1)
    band: int = 8
    band_of: str = "m"
    in_flight: int = 1
    in_shared: int = 2

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns of one consumer warpgroup."""
        if self.split == "m":
            return self.tile_m // self.consumers, self.tile_n
        return self.tile_m, self.tile_n // self.consumers


ROWS = (512, 2048, 8192)
COLUMNS = (1024, 4096, 16384)
"""Upper ends of the table's buckets; what is larger falls into the last."""

TABLE: dict[tuple[str, int, int], Schedule] = {
    (order, T, N): schedule
    for order, schedule in (("chain", Schedule(128, 256)), ("tree", Schedule(128, 128, steps=5, in_shared=1)))
    for T in ROWS
    for N in COLUMNS
}


def _bucket(size: int, ends: tuple[int, ...]) -> int:
    return next((end for end in ends if size <= end), ends[-1])


def large(T: int, N: int, K: int, leaves: int) -> Schedule:
    """The schedule for x [T, K] w [N, K]^T in `leaves` leaves."""
    del K
    return TABLE["chain" if leaves == 1 else "tree", _bucket(T, ROWS), _bucket(N, COLUMNS)]
