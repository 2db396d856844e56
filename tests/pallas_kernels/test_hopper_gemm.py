"""The Hopper GEMM without a GPU: in the interpreter, with its race detector, against float64; every schedule lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic, registry
from pallas_kernels.gemm import hopper, hopper_large, reference, schedules
from pallas_kernels.gemm.schedules import Schedule
from tests.pallas_kernels.base import relative, spread

SMALL = {
    "rows divided": Schedule(128, 64, steps=2),
    "columns divided": Schedule(64, 128, split="n", steps=3),
    "bands along columns": Schedule(128, 64, steps=2, band=1, band_of="n"),
    "cluster along rows": Schedule(128, 64, steps=2, cluster=(2, 1)),
    "cluster along columns": Schedule(128, 64, steps=2, cluster=(1, 2)),
    "no product under way": Schedule(128, 112, steps=3, in_flight=0),
    "half a tree in shared memory": Schedule(128, 64, steps=3, in_shared=True),
    "that, and no product under way": Schedule(128, 64, steps=3, in_flight=0, in_shared=True),
}
"""Schedules of every form, small enough for the interpreter."""


@pytest.fixture
def few_programs(monkeypatch):
    """Three programs: each has several tiles, and the ring goes on from one to the next."""
    monkeypatch.setattr(mosaic, "SMS", 3)


def interpreted(monkeypatch, schedule, *args, **kwargs):
    monkeypatch.setattr(schedules, "is_few", lambda *_: False)
    monkeypatch.setattr(schedules, "large", lambda *_: schedule)
    with mosaic.interpreted():
        y = np.asarray(hopper.gemm(*args, **kwargs))
    assert not gpu_callbacks.get_races().races_found
    return y


def operands(T, N, K):
    rng = np.random.default_rng(0)
    return spread(rng, T, K, binades=2), spread(rng, N, K, binades=2)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("T, N, K, leaves", [(264, 200, 192, 1), (136, 128, 512, 8)])
def test_every_form_of_schedule(monkeypatch, few_programs, name, T, N, K, leaves):
    x, w = operands(T, N, K)
    y = interpreted(monkeypatch, SMALL[name], x, w, None, leaves, "row", jnp.float32)
    assert y.shape == (T, N)
    assert relative(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T) < 1e-6


@pytest.mark.parametrize(
    "T, out_dtype, tolerance", [(1, "bfloat16", 4e-3), (8, "float32", 1e-6), (13, "float32", 1e-6), (72, "bfloat16", 4e-3)]
)
def test_any_rows_and_a_layer_of_a_stack(monkeypatch, few_programs, T, out_dtype, tolerance):
    x, w = operands(T, 3 * 72, 128)
    stack = w.reshape(3, 72, 128)
    y = interpreted(monkeypatch, SMALL["rows divided"], x, stack, jnp.int32(2), 2, "column", jnp.dtype(out_dtype))
    assert y.shape == (T, 72) and y.dtype == out_dtype
    assert relative(y, np.asarray(x, np.float64) @ np.asarray(stack[2], np.float64).T) < tolerance
    assert relative(y, reference.gemm(x, stack, jnp.int32(2), 2, "column", jnp.dtype(out_dtype))) < tolerance


def test_few_rows_go_to_the_other_kernel(monkeypatch):
    x, w = operands(13, 72, 128)
    monkeypatch.setattr(hopper_large, "matmul", None)
    with mosaic.interpreted():
        y = hopper.gemm(x, w, None, 1, "column", jnp.float32, padded_N=80, fill=-1.0)
    assert relative(y[:, :72], np.asarray(x, np.float64) @ np.asarray(w, np.float64).T) < 1e-6
    assert np.array_equal(y[:, 72:], np.full((13, 8), -1.0))


def test_columns_past_the_weight_are_filled(monkeypatch, few_programs):
    x, w = operands(20, 136, 64)
    y = interpreted(monkeypatch, SMALL["rows divided"], x, w, None, 1, "column", jnp.float32, padded_N=256)
    assert np.array_equal(y[:, 136:], np.full((20, 120), -np.inf, np.float32))
    assert relative(y[:, :136], np.asarray(x, np.float64) @ np.asarray(w, np.float64).T) < 1e-6
    zeros = interpreted(monkeypatch, SMALL["rows divided"], x, w, None, 1, "column", jnp.float32, padded_N=256, fill=0.0)
    assert np.array_equal(zeros[:, :136], y[:, :136]) and not zeros[:, 136:].any()


def test_control_the_race_detector_sees_a_race(monkeypatch, few_programs):
    """An epilogue whose consumers share one buffer and do not wait."""
    schedule = SMALL["rows divided"]
    x, w = operands(128, 64, 64)
    honest = hopper_large.store(128, 64, jnp.float32, schedule)

    def run(acc_mn, tile, inputs, outputs, scratch):
        honest.run(acc_mn, tile._replace(wg=tile.wg * 0), inputs, outputs, scratch)

    racing = hopper_large.Epilogue(run, honest.outputs, honest.inputs, honest.scratch)
    with mosaic.interpreted():
        jax.block_until_ready(hopper_large.matmul(x, w, None, 1, 64, racing, schedule))
    assert gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("order, leaves", [("chain", 1), ("tree", 8), ("tree", 2)])
def test_every_entry_of_the_table_lowers(order, leaves):
    for schedule in schedules.every(order):
        # A plain matrix of whole tiles in bf16, and a layer of a stack, ragged, in fp32.
        for T, N, stack, out_dtype in ((1024, 1024, (), jnp.bfloat16), (304, 1000, (2,), jnp.float32)):
            epilogue = hopper_large.store(T, N, out_dtype, schedule)
            shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, 1024), (*stack, N, 1024))]
            shapes += [jax.ShapeDtypeStruct((), jnp.int32) for _ in stack]

            def run(x, w, layer=None, N=N, epilogue=epilogue, schedule=schedule):
                return hopper_large.matmul(x, w, layer, leaves, N, epilogue, schedule)

            text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
            assert "mosaic_gpu" in text


def test_a_tree_adds_leaves_pairwise_and_the_lower_on_the_left():
    class Leaf(str):
        def __add__(self, other):
            return Leaf(f"({self}{other})")

    sums = ()
    with mosaic.interpreted():
        for i in range(8):
            sums = hopper_large._added(sums, Leaf(i))  # noqa: SLF001
    assert sums == ((3, "(((01)(23))((45)(67)))"),)


def test_what_it_cannot_do_is_named():
    x, w = jnp.ones((8, 128), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    with pytest.raises(registry.Unsupported, match="multiplies bfloat16, got float32"):
        hopper.gemm(x.astype(jnp.float32), w.astype(jnp.float32), None, 1, "row", jnp.float32)
    with pytest.raises(registry.Unsupported, match="rounds to bfloat16 or float32"):
        hopper.gemm(x, w, None, 1, "row", jnp.float16)
    with pytest.raises(registry.Unsupported, match="K in 4 leaves of a multiple of 64"):
        hopper.gemm(x, w, None, 4, "row", jnp.float32)
    with pytest.raises(registry.Unsupported, match="got K=128, N=60"):
        hopper.gemm(x, w[:60], None, 1, "row", jnp.float32)
