"""silu_mul inside the GEMM that feeds it: the bits of the two ops, whatever the schedule, the tokens and their neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm, silu_mul
from pallas_kernels.gemm import hopper_small, schedules
from pallas_kernels.silu_mul import hopper_of_gemm
from pallas_kernels.silu_mul.hopper_product import product
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import bits, same, spread

MODELS = {"smollm2": (1536, 576), "qwen3-0.6b": (3072, 1024), "qwen3-8b": (12288, 4096)}
"""F, K."""
TOKENS = [
    *(("smollm2", T) for T in (1, 9, 31, 40, 100, 200, 256, 2000)),
    *(("qwen3-0.6b", T) for T in (7, 16, 64, 128, 250, 700)),
    *(("qwen3-8b", T) for T in (8, 40, 65, 200, 256, 1030)),
]
"""Each of the tables' buckets for few tokens, ragged and full, and some for many."""
RAGGED = (1096, 1024)
"""F, K: the last tile of no schedule is whole."""


@functools.cache
def operands(F: int, K: int):
    """256 rows and a weight over 13 binades, the weight scaled so that gates reach from the flat to the steep part of silu."""
    rng = np.random.default_rng(F + K)
    return spread(rng, 256, K), spread(rng, 2, F, K) * jnp.bfloat16(K**-0.5 / 16)


@jax.jit
def two(x, w, layer=None):
    """The ops apart."""
    gate_up = gemm.chain(x, Weight(w, layer), region="a", impl="hopper")
    return silu_mul.silu_mul(gate_up, region="b", impl="hopper")


@jax.jit
def one(x, w, layer=None):
    return silu_mul.of_gemm(x, Weight(w, layer), regions=("a", "b"), impl="hopper")


@functools.partial(jax.jit, static_argnums=2)
def by(x, w, schedule):
    if isinstance(schedule, schedules.Schedule):
        return hopper_of_gemm.large(x, Weight(w), schedule)
    return hopper_small.small_gemm(x, w, None, 1, x.dtype, gate=product, schedule=schedule)


@pytest.mark.parametrize("model, T", TOKENS)
def test_the_bits_of_two_ops(model, T):
    x, w = operands(*MODELS[model])
    pick = np.random.default_rng(T).integers(0, 256, T)
    y = one(x[pick], w)
    assert same([y], [two(x[pick], w)])
    finite = np.asarray(y, np.float32)
    assert np.isfinite(finite).all() and len(np.unique(bits(y))) > 1000


@pytest.mark.parametrize("T", [8, 200])
def test_neighbours_do_not_reach_a_row(T):
    """NaN in every other row, and one ULP in one: the control that a row's own operands do reach it."""
    F, K = MODELS["qwen3-0.6b"]
    x, w = operands(F, K)
    x = x[:T]
    odd = np.arange(T) % 2 == 1
    clean, dirty = one(x, w), one(jnp.where(odd[:, None], jnp.nan, x), w)
    assert np.isnan(np.asarray(dirty, np.float32)[odd]).all() and same([dirty[~odd]], [clean[~odd]])
    changed = np.array(x)
    changed.view(np.uint16)[5] ^= 1
    differs = bits(one(jnp.asarray(changed), w)) != bits(clean)
    assert np.flatnonzero(differs.any(axis=1)).tolist() == [5]


OF_GEMM = (s for (order, _), of in hopper_small.TABLE.items() if order == "chain" for _, s in of)
FEW = dict.fromkeys((*OF_GEMM, *hopper_of_gemm.WIDE.values()))
MANY = schedules.every("chain")


@pytest.mark.parametrize("schedule", [*FEW, *MANY], ids=str)
def test_every_schedule_of_the_tables(schedule):
    x, w = operands(*RAGGED)
    T = 253 if schedule in MANY else schedule.tokens * schedule.join - 3
    want = two(x, w)
    assert same([by(x[:T], w, schedule)], [want[:T]])


@pytest.mark.parametrize("T", [9, 200])
def test_a_layer_of_a_stack(T):
    F, K = MODELS["qwen3-0.6b"]
    x, w = operands(F, K)
    stack = jnp.stack([w[:, ::-1], jnp.full_like(w, jnp.nan), w])
    for layer in (0, 2):
        assert same([one(x[:T], stack, jnp.int32(layer))], [two(x[:T], stack[layer])])
