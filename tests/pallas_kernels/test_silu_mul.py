from __future__ import annotations

import numpy as np

from pallas_kernels import silu_mul
from tests.pallas_kernels.base import RowOp, spread


class TestSiluMul(RowOp):
    def rows(self, rng, T, dtype):
        return (spread(rng, T, 2 * 192, binades=3, dtype=dtype),)

    def call(self, impl, x):
        return (silu_mul.silu_mul(x, region="r", impl=impl),)

    def exact(self, x):
        gate, up = np.split(x, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * up,)
