"""The MLP in one kernel, without a GPU: its parts in the interpreter one after the other, the whole lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm, grid_barrier, mosaic, registry, silu_mul
from pallas_kernels.gemm.hopper_small import SMEM_BYTES
from pallas_kernels.mlp import hopper, mlp
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import relative, same, spread

REGIONS = ("gate_up", "silu_mul", "down_proj")
SHAPES = {"smollm2": (576, 1536, 576), "qwen3-0.6b": (1024, 3072, 1024), "ragged": (1096, 3136, 1024)}
"""D, F, K."""
TOKENS = (1, 3, 16, 17, 64)


def operands(T, D, F, K, layers=()):
    rng = np.random.default_rng(T + D + F + K)
    x, w, v = (spread(rng, *shape, binades=2) for shape in ((T, K), (*layers, 2, F, K), (*layers, D, F)))
    return x, w * jnp.bfloat16(K**-0.5), v


def apart(x, w, v, impl="reference"):
    h = silu_mul.of_gemm(x, w, regions=REGIONS[:2], impl=impl)
    return gemm.tree(h, v, region=REGIONS[2], impl=impl)


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_the_bits_and_the_entries_of_the_ops(impl):
    x, w, v = operands(5, 72, 128, 64)
    with registry.recording() as ours:
        y = mlp(x, w, v, regions=REGIONS, impl=impl)
    with registry.recording() as theirs:
        assert same([y], [apart(x, w, v, impl)])
    assert list(ours) == list(REGIONS) and ours == theirs


@pytest.mark.parametrize("T, F", [(3, 128), (17, 512)])
def test_parts_in_the_interpreter(T, F):
    """Two leaves and eight, a layer of a stack; rows of padding are dropped. Races are not asked for: instructions over packed
    weights read what is on its way, for rows that nobody stores."""
    x, w, v = operands(T, 40, F, 64, layers=(2,))
    with mosaic.interpreted():
        y = np.asarray(hopper.mlp(x, Weight(w, jnp.int32(1)), Weight(v, jnp.int32(1))))
    assert y.shape == (T, 40) and y.dtype == jnp.bfloat16 and relative(y, apart(x, w[1], v[1])) < 4e-3


def lowered(T, D, F, K, run=hopper.mlp):
    shape = jax.ShapeDtypeStruct
    stack = [shape((2, *dims), jnp.bfloat16) for dims in ((2, F, K), (D, F))]
    args = shape((T, K), jnp.bfloat16), *stack, shape((), jnp.int32)
    return jax.jit(lambda x, w, v, i: run(x, Weight(w, i), Weight(v, i))).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("model", SHAPES)
def test_one_kernel_lowers(model, T):
    assert lowered(T, *SHAPES[model]).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("model", SHAPES)
def test_programs_have_a_multiprocessor_each(model, T):
    """As many as there are at most, one of them fits in shared memory and two do not; no program without its part of both."""
    first, second = hopper.parts(T, *SHAPES[model])
    held = [part.smem_bytes(part.schedule.stages) for part in (first, second)]
    assert SMEM_BYTES / 2 < sum(held) <= SMEM_BYTES
    for part in (first, second):
        assert part.programs <= mosaic.SMS and part.schedule.stages >= 2 and part.join == part.schedule.split == 1
        assert not part.schedule.waiting(part.leaves)  # nothing relies on Mosaic's own barriers


def test_it_serves_where_it_was_measured(monkeypatch):
    x, w, v = operands(16, *SHAPES["smollm2"])
    weights = Weight(w), Weight(v)
    monkeypatch.setattr(grid_barrier, "fits", lambda programs: programs <= 96)
    monkeypatch.setattr(hopper, "FASTER", frozenset())
    assert not hopper.pays(x, *weights)
    monkeypatch.setattr(hopper, "FASTER", frozenset({(*SHAPES["smollm2"], 16)}))
    assert hopper.pays(x, *weights) and hopper.pays(x[:9], *weights)
    assert not hopper.pays(x[:8], *weights) and not hopper.pays(jnp.zeros((17, 576), x.dtype), *weights)
    assert not hopper.pays(*(jax.tree.map(lambda a: a.astype(jnp.float32), arg) for arg in (x, *weights)))
    run = lambda x, w, v: mlp(x, w, v, regions=REGIONS, impl="hopper")  # noqa: E731
    with registry.recording() as ours:
        assert lowered(16, *SHAPES["smollm2"], run).count("@mosaic_gpu_v2") == 1
    monkeypatch.setattr(grid_barrier, "fits", lambda programs: programs <= 95)
    with registry.recording() as theirs:
        assert lowered(16, *SHAPES["smollm2"], run).count("@mosaic_gpu_v2") == 2
    assert list(ours) == list(REGIONS) and ours == theirs


def test_a_barrier_needs_a_known_number_of_multiprocessors():
    """A CPU has none, so nothing waits on it."""
    assert not grid_barrier.fits(1)


def test_counters_are_at_rest_and_a_constant_that_is_kept():
    counters = np.asarray(grid_barrier.counters())
    assert counters[grid_barrier.ARRIVED] == counters[grid_barrier.LEFT] == 0 and len(set(counters.tolist())) > 1


def test_faults_are_named():
    x, w, v = operands(16, 72, 512, 128)
    with pytest.raises(ValueError, match="both weights are layers"):
        hopper.mlp(x, Weight(w), Weight(v[None], jnp.int32(0)))
    with pytest.raises(ValueError, match="1 to 64 tokens, not 65"):
        hopper.parts(65, 72, 512, 128)
    with pytest.raises(ValueError, match="D 72, F 516.*multiples of 8"):
        hopper.parts(16, 72, 516, 128)
