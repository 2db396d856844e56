from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm, registry, silu_mul
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import RowOp, same, spread


class TestSiluMul(RowOp):
    def rows(self, rng, T, dtype):
        return (spread(rng, T, 2 * 192, binades=3, dtype=dtype),)

    def call(self, impl, x):
        return (silu_mul.silu_mul(x, region="r", impl=impl),)

    def exact(self, x):
        gate, up = np.split(x, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * up,)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_of_a_gemm(impl):
    """The bits and the entries of the two ops."""
    rng = np.random.default_rng(0)
    x, w = spread(rng, 13, 128, binades=2), Weight(spread(rng, 3, 2, 40, 128, binades=2), jnp.int32(1))

    def two(x, w):
        gate_up = gemm.chain(x, w, region="a", impl=impl)
        return silu_mul.silu_mul(gate_up, region="b", impl=impl)

    runs = [lambda x, w: silu_mul.of_gemm(x, w, regions=("a", "b"), impl=impl), two]
    results, entries = [], []
    for run in runs:
        with registry.recording() as of_run:
            results.append(jax.jit(run)(x, w))
        entries.append(of_run)
    assert same(results[:1], results[1:]) and entries[0] == entries[1] and list(entries[0]) == ["a", "b"]
