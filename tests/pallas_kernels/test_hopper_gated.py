"""silu_mul inside the GEMM that feeds it, without a GPU: in the interpreter with race detection, and lowered for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import gemm, mosaic, registry, silu_mul
from pallas_kernels.gemm import hopper_gated, hopper_small, schedules
from pallas_kernels.gemm.hopper_small import Schedule, small_gemm
from pallas_kernels.silu_mul import hopper_of_gemm, reference
from pallas_kernels.silu_mul.hopper_product import product
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import relative, spread

REGIONS = ("gate_up", "silu_mul")


def operands(T, F, K, layers=()):
    rng = np.random.default_rng(T + F + K)
    return spread(rng, T, K, binades=2), spread(rng, *layers, 2, F, K, binades=2) * jnp.bfloat16(K**-0.5)


def want(x, w):
    """The product of gates and ups that are rounded to bf16 first."""
    flat = np.asarray(w, np.float64).reshape(-1, w.shape[-1])
    return reference.silu_mul(jnp.asarray(np.asarray(x, np.float64) @ flat.T, jnp.bfloat16))


def of_gemm(x, w):
    return silu_mul.of_gemm(x, w, regions=REGIONS, impl="hopper")


def check(run, x, w):
    """Of the interpreter, whose dots add in another order: a gate or an up may be rounded otherwise."""
    with mosaic.interpreted():
        y = np.asarray(run())
    assert not gpu_callbacks.get_races().races_found
    assert y.shape == (len(x), w.shape[-2]) and y.dtype == jnp.bfloat16 and relative(y, want(x, w)) < 4e-3


FEW = {
    "ragged tokens and columns, programs that walk, more loads than stages": (9, 72, 128, Schedule(tokens=16, stages=3, programs=2)),
    "fewer rows than an instruction's": (16, 72, 128, Schedule(rows=48, tokens=16, stages=2)),
}
CROWDED = (20, 104, 128, Schedule(rows=128, tokens=16, stages=2, join=2, programs=1))
"""Weights shared by two blocks of tokens, two warpgroups, programs that walk."""
TILE = schedules.Schedule(128, 96, steps=2)
CLUSTER = schedules.Schedule(128, 64, steps=2, cluster=(2, 1))


def few(T, F, K, schedule):
    x, w = operands(T, F, K)
    check(lambda: small_gemm(x, w, None, 1, jnp.bfloat16, gate=product, schedule=schedule), x, w)


@pytest.mark.parametrize("case", FEW)
def test_few_tokens(case):
    few(*FEW[case])


def test_few_tokens_by_programs_that_wait_for_each_other():
    """In a process whose XLA has threads for all: see tests/pallas_kernels/test_hopper_gemm_small.py."""
    code = "from tests.pallas_kernels import test_hopper_gated as t; t.few(*t.CROWDED)"
    environment = {**os.environ, "PJRT_NPROC": str(mosaic.INTERPRETER_THREADS)}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]


def test_many_tokens_of_a_cluster_that_shares_weights():
    x, w = operands(136, 64, 128)
    check(lambda: hopper_of_gemm.large(x, Weight(w), CLUSTER), x, w)


@pytest.mark.parametrize("is_few", [True, False])
def test_a_layer_of_a_stack_whose_last_tile_is_ragged(monkeypatch, is_few):
    x, stack = operands(5, 72, 64, layers=(3,))
    monkeypatch.setattr(schedules, "is_few", lambda *_: is_few)
    monkeypatch.setattr(schedules, "large", lambda *_: TILE)
    check(lambda: of_gemm(x, Weight(stack, jnp.int32(1))), x, stack[1])


def lowered(T, F, K, run) -> str:
    shape = jax.ShapeDtypeStruct
    args = shape((T, K), jnp.bfloat16), shape((2, 2, F, K), jnp.bfloat16), shape((), jnp.int32)
    return jax.jit(lambda x, w, layer: run(x, Weight(w, layer))).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", [tokens for order, tokens in hopper_small.TABLE if order == "chain"])
def test_every_schedule_for_few_tokens_lowers(tokens):
    wide = [hopper_of_gemm.WIDE[tokens]] if tokens in hopper_of_gemm.WIDE else []
    for s in dict.fromkeys((*(s for _, s in hopper_small.TABLE["chain", tokens]), *wide)):
        run = lambda x, w, s=s: small_gemm(x, w.value, w.layer, 1, jnp.bfloat16, gate=product, schedule=s)  # noqa: E731
        assert "mosaic_gpu" in lowered(s.tokens * s.join, 1096, 1024, run)


def test_every_schedule_for_many_tokens_lowers():
    for s in schedules.every("chain"):
        assert "mosaic_gpu" in lowered(304, 1096, 1024, lambda x, w, s=s: hopper_of_gemm.large(x, w, s))


@pytest.mark.parametrize("T, F", [(1, 576), (200, 576), (256, 3072), (4096, 24)])
def test_one_kernel_has_the_entries_of_two(T, F):
    with registry.recording() as entries:
        assert lowered(T, F, 64, of_gemm).count("@mosaic_gpu_v2") == 1
    x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((2, F, 64), jnp.bfloat16)

    def two():
        return silu_mul.silu_mul(gemm.chain(x, w, region=REGIONS[0], impl="hopper"), region=REGIONS[1], impl="hopper")

    with registry.recording() as of_two:
        jax.eval_shape(two)
    assert list(entries) == list(REGIONS) and entries == of_two


def test_wide_weights_have_schedules_of_their_own():
    """Where the table says so, and where K falls into their steps."""
    for T, wide in ((1, 8), (16, 16), (17, 32), (40, 64), (128, 128)):
        assert hopper_of_gemm.few_schedule(T, 12288, 4096) is hopper_of_gemm.WIDE[wide]
    for T, F, K in ((200, 12288, 4096), (8, 6144, 2048), (8, 17408, 5120), (8, 12288, 576)):
        assert hopper_of_gemm.few_schedule(T, F, K) == hopper_small.schedule_for(T, 2 * F, K, 1)


def test_faults_are_named():
    x, w = operands(8, 64, 128)
    with pytest.raises(ValueError, match="gates and ups are whole chains"):
        small_gemm(x, w, None, 2, jnp.bfloat16, gate=product)
    with pytest.raises(ValueError, match="join must divide"):
        small_gemm(x, w, None, 1, jnp.bfloat16, gate=product, schedule=Schedule(rows=48, tokens=8, join=2))
    with pytest.raises(ValueError, match="consumers must divide the rows"):
        hopper_of_gemm.large(x, Weight(w), schedules.Schedule(64, 128, split="n"))
    with pytest.raises(ValueError, match="do not share K"):
        of_gemm(x[:, :64], w)
    with pytest.raises(registry.Unsupported, match="multiplies bfloat16, got float32"):
        of_gemm(x.astype(jnp.float32), w.astype(jnp.float32))


def test_gates_and_ups_take_turns():
    """What the interpreter's weights stand for."""
    value = jnp.arange(2 * 5).reshape(2, 5, 1)
    assert hopper_gated.in_turn(value, 2)[0, :, 0].tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 0, 9, 0]
