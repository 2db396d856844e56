"""The small Hopper GEMM without a GPU: in JAX's interpreter with race detection, and lowered for CUDA. No bits of wgmma here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels.gemm import hopper_parts, hopper_small
from pallas_kernels.gemm.hopper_small import Schedule, small_gemm
from tests.pallas_kernels import interpreter
from tests.pallas_kernels.base import same, spread


def operands(T, N, K, layers=None):
    rng = np.random.default_rng(T + N + K)
    return spread(rng, T, K, binades=2), spread(rng, *(() if layers is None else (layers,)), N, K, binades=2)


def interpreted(*args, **options):
    with mosaic.interpreted():
        return small_gemm(*args, **options)


def close(got, x, w):
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
    return error < (1e-2 if got.dtype == jnp.bfloat16 else 1e-5)


CASES = {
    "one row, more loads than stages": (1, 136, 256, 1, Schedule(tokens=8, stages=2)),
    "ragged tokens and rows, programs that walk, a tree": (9, 136, 512, 4, Schedule(tokens=16, stages=3, programs=2)),
    "fewer rows than an instruction's": (16, 96, 256, 2, Schedule(rows=48, tokens=16, stages=2)),
    "two blocks of tokens, apart": (20, 64, 256, 2, Schedule(tokens=16, k_tile=128, stages=2)),
    "sums that wait in shared memory": (128, 64, 512, 8, Schedule(tokens=128, stages=2)),
    "sums that wait in registers, by loops": (64, 64, 512, 8, Schedule(stages=2)),
}
CROWDED = {
    "two warpgroups": (9, 200, 128, 2, Schedule(rows=128, tokens=16, stages=2, programs=1)),
    "weights shared by two blocks of tokens": (20, 128, 256, 2, Schedule(tokens=16, stages=2, join=2)),
    "both, programs that walk": (27, 256, 128, 1, Schedule(rows=128, tokens=16, stages=2, join=2, programs=1)),
}
"""Cases of three warpgroups or more, which all may wait at once."""


def check(case, out_dtype):
    T, N, K, leaves, schedule = case
    x, w = operands(T, N, K)
    y = interpreted(x, w, None, leaves, out_dtype, schedule=schedule)
    assert y.shape == (T, N) and y.dtype == out_dtype and close(y, x, w)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_against_float64(case, out_dtype):
    check(CASES[case], out_dtype)


def test_programs_that_wait_for_each_other():
    interpreter.run(
        "from tests.pallas_kernels import test_hopper_gemm_small as t\nfor c in t.CROWDED.values(): t.check(c, t.jnp.float32)"
    )


def test_columns_after_the_weight_hold_the_fill():
    x, w = operands(5, 72, 128)
    y = interpreted(x, w, None, 1, jnp.float32, columns=192, fill=-jnp.inf, schedule=Schedule(tokens=8))
    assert close(y[:, :72], x, w) and np.isneginf(y[:, 72:]).all()


def test_a_stack_is_indexed_in_place():
    x, w = operands(5, 72, 128, layers=3)
    run = jax.jit(lambda layer: interpreted(x, w, layer, 2, jnp.float32, schedule=Schedule(tokens=8)))
    for layer in range(3):
        plain = interpreted(x, w[layer], None, 2, jnp.float32, schedule=Schedule(tokens=8))
        assert close(plain, x, w[layer]) and same([run(jnp.int32(layer))], [plain])


def test_a_tree_adds_leaves_pairwise_and_the_lower_on_the_left():
    log = []

    class Leaf:
        def __init__(self, name):
            self.name = name

        def __add__(self, other):
            return Leaf(f"({self.name}{other.name})")

    def leaves():
        for i in range(8):
            log.append(i)
            yield Leaf(str(i))

    assert hopper_parts.tree_of(leaves()).name == "(((01)(23))((45)(67)))" and log == list(range(8))


def lowered(T, N, K, leaves, out_dtype, schedule=None, **options):
    """Text of the program for CUDA: it fails where a layout or a transfer does not exist."""
    run = lambda x, w, layer: small_gemm(x, w, layer, leaves, out_dtype, schedule=schedule, **options)  # noqa: E731
    shape = jax.ShapeDtypeStruct
    args = shape((T, K), jnp.bfloat16), shape((2, N, K), jnp.bfloat16), shape((), jnp.int32)
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("order, tokens", hopper_small.TABLE)
def test_every_schedule_lowers(order, tokens):
    leaves = 1 if order == "chain" else 8
    for i, (_, schedule) in enumerate(hopper_small.TABLE[order, tokens]):
        out_dtype = (jnp.bfloat16, jnp.float32)[i % 2]
        assert "mosaic_gpu" in lowered(schedule.tokens * schedule.join, 1096, 2048, leaves, out_dtype, schedule)


@pytest.mark.parametrize(
    "T, N, K, leaves", [(1, 960, 576, 1), (7, 576, 1536, 8), (9, 8, 64, 1), (65, 24, 128, 2), (200, 24576, 4096, 1)]
)
def test_the_table_serves_any_shape(T, N, K, leaves):
    assert "mosaic_gpu" in lowered(T, N, K, leaves, jnp.float32)


def test_the_table_fits():
    """Every bucket has a schedule that the kernel takes, with at least two stages in shared memory, for either result."""
    for T in (1, 8, 9, 31, 64, 65, 128, 129, 200, 256):
        for N in (8, 576, 2048, 4096, 6144, 8192, 24576, 151936):
            for leaves in (1, 2, 4, 8):
                for out_dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
                    schedule = hopper_small.fitted(hopper_small.schedule_for(T, N, 1536, leaves), leaves, out_dtype)
                    assert hopper_small.fault(T, N, 1536, leaves, N, schedule, out_dtype) is None


def test_the_next_kernel_may_start_early():
    """Its programs set up while this one's end: the launch carries the attribute that the kernel's wait asks for."""
    assert "uses_pdl" in lowered(8, 64, 64, 1, jnp.float32)


def test_programs_send_sums_without_waiting_for_the_whole_gpu():
    """mosaic.py replaces Mosaic's own instruction."""
    text = lowered(64, 64, 512, 8, jnp.float32, Schedule(split=2))
    assert "mbarrier.arrive.expect_tx.relaxed.cluster" in text


@pytest.mark.parametrize(
    "T, N, K, leaves, schedule, fault",
    [
        (257, 64, 64, 1, Schedule(), "tokens must be 1..256"),
        (8, 12, 64, 1, Schedule(), "multiples of 8"),
        (8, 64, 192, 2, Schedule(), "divides a leaf"),
        (8, 64, 128, 2, Schedule(split=4), "divides leaves"),
        (8, 64, 64, 1, Schedule(rows=40), "rows must be"),
        (128, 64, 512, 8, Schedule(256, 256, k_tile=128), "divides a leaf"),
        (128, 64, 512, 1, Schedule(256, 256, k_tile=256), "shared memory"),
        (256, 64, 512, 8, Schedule(split=8, join=2), "8 programs at most"),
        (64, 64, 512, 8, Schedule(split=2, programs=2), "has one tile"),
        (64, 64, 64, 1, Schedule(tokens=8, join=3), "join must divide"),
    ],
)
def test_faults_are_named(T, N, K, leaves, schedule, fault):
    with pytest.raises(ValueError, match=fault):
        small_gemm(jnp.ones((T, K), jnp.bfloat16), jnp.ones((N, K), jnp.bfloat16), None, leaves, jnp.float32, schedule=schedule)


def test_weights_leave_the_cache_first_and_tokens_do_not(monkeypatch):
    hinted = []
    load = mosaic._load
    monkeypatch.setattr(mosaic, "_load", lambda *a, **options: hinted.append("l2_cache_hint" in options) or load(*a, **options))
    lowered(24, 1048, 2048, 1, jnp.bfloat16)
    assert hinted == [True, False]
