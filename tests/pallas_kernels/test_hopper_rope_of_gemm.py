"""qk_norm_rope inside the GEMM that feeds it, without a GPU: in the interpreter with race detection, and lowered for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic
from pallas_kernels.gemm.hopper_small import Schedule
from tests.pallas_kernels import rope_of_gemm_work as work
from tests.pallas_kernels.base import same
from tests.pallas_kernels.rope_of_gemm_work import Case

LAYER = jnp.int32(1)


def interpreted(call, *args):
    with mosaic.interpreted():
        out = [np.asarray(y) for y in call(*args)]
    assert not gpu_callbacks.get_races().races_found
    return out


FEW = {
    "ragged tokens, programs that walk": (Case(9, 1, 2, 64, 128, 16), Schedule(tokens=16, stages=3, programs=2)),
    "no norm, two heads a program, a tile past the end": (
        Case(5, 1, 1, 64, 64, 128, has_norm=False),
        Schedule(rows=128, tokens=8, stages=2),
    ),
}
SHARED = {
    "128, programs that walk, loads shared": (
        Case(37, 1, 1, 128, 128, 16),
        Schedule(rows=128, tokens=24, stages=2, join=2, programs=1),
    ),
    "256": (Case(40, 1, 1, 256, 64, 128), Schedule(rows=256, tokens=40, stages=2)),
    "two heads of 128, no norm": (Case(8, 1, 2, 128, 64, 16, has_norm=False), Schedule(rows=256, tokens=8, stages=2)),
}
"""Heads of several warpgroups, which wait for each other."""


def bits_of_two_kernels(case: Case, schedule: Schedule):
    args = *work.operands(case), LAYER
    got = interpreted(work.one, case, schedule, "hopper", *args)
    want = interpreted(work.two, case, schedule, *args)
    assert same(got, want)
    assert not same(got[1:], args[5:7]), "control: something was written"


@pytest.mark.parametrize("case", FEW)
def test_the_bits_of_two_kernels(case):
    bits_of_two_kernels(*FEW[case])


if __name__ == "__main__":
    import time
    for n, c in (FEW | SHARED).items():
        t=time.time(); bits_of_two_kernels(*c); print(n, time.time()-t, flush=True)
