"""Bits of the few-token GEMM on the GPU: no schedule, neighbour or number of rows reaches a row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import hopper_large, hopper_small, schedules
from pallas_kernels.gemm.hopper_small import Schedule, small_gemm
from tests.pallas_kernels.base import bits, errors, same, spread

TOKENS = (1, 2, 7, 8, 9, 31, 64, 65, 200, 256)
SHAPES = {"chain": (960, 576, 1), "tree": (576, 1536, 8)}
"""N, K, leaves."""
TABLED = list(
    dict.fromkeys(
        (order, dataclasses.replace(schedule, programs=5 if schedule.split == 1 else 0))
        for (order, tokens), entries in hopper_small.TABLE.items()
        for _, schedule in entries
        if (tokens in (16, 128, 256) and schedule.tokens != 64)
        or schedule.rows == 48
        or (order == "tree" and tokens == 64 and schedule.split < 4)
    )
)
"""Each entry for 16, 128 and 256 tokens, with programs that walk over tiles of a small weight, and those for 8, 32 and 64 tokens
that differ from them in more than the instruction's width."""


@functools.cache
def operands(N: int, K: int):
    """Rows and a weight whose values lie over 13 binades: a sum in another order is another sum."""
    rng = np.random.default_rng(N + K)
    return spread(rng, 256, K), spread(rng, N, K)


@functools.partial(jax.jit, static_argnames=("leaves", "out_dtype", "columns", "fill", "schedule"))
def run(x, w, layer=None, *, leaves, out_dtype=jnp.float32, columns=None, fill=0.0, schedule=None):
    return small_gemm(x, w, layer, leaves, out_dtype, columns=columns, fill=fill, schedule=schedule)


@functools.cache
def canonical(N: int, K: int, leaves: int) -> np.ndarray:
    """256 rows: each leaf by a launch of one plain schedule, leaves added on the host as the contract says."""
    x, w = operands(N, K)
    plain = Schedule(rows=64, tokens=64, stages=2)
    size = K // leaves
    cut = lambda a, i: a[:, i * size : (i + 1) * size]  # noqa: E731
    parts = [np.asarray(run(cut(x, i), cut(w, i), leaves=1, schedule=plain)) for i in range(leaves)]
    in_order = sum(parts[1:], parts[0])
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    if leaves > 1:
        assert not same([in_order], parts), "operands that do not reveal the order"
    return parts[0]


@pytest.mark.parametrize("kind, T", [*((kind, T) for kind in SHAPES for T in TOKENS)])
def test_a_row_alone_and_in_any_batch(kind, T):
    """By the table's schedule of each number of tokens, rows at other places than in the canonical batch."""
    N, K, leaves = SHAPES[kind]
    x, w = operands(N, K)
    pick = np.random.default_rng(T).permutation(256)[:T]
    assert same([run(x[pick], w, leaves=leaves)], [canonical(N, K, leaves)[pick]])


@pytest.mark.parametrize("order, schedule", TABLED, ids=str)
def test_every_schedule_of_the_table(order, schedule):
    N, K, leaves = 1096, 2048, 1 if order == "chain" else 8
    x, w = operands(N, K)
    rows = slice(0, schedule.tokens * schedule.join - 3)
    assert same([run(x[rows], w, leaves=leaves, schedule=schedule)], [canonical(N, K, leaves)[rows]])


@pytest.mark.parametrize("kind", SHAPES)
def test_the_large_kernel_has_the_same_bits(kind):
    N, K, leaves = SHAPES[kind]
    x, w = operands(N, K)
    schedule = schedules.large(256, N, K, leaves)
    epilogue = hopper_large.store(256, N, jnp.dtype(jnp.float32), schedule)
    (large,) = jax.jit(lambda x, w: hopper_large.matmul(x, w, None, leaves, N, epilogue, schedule))(x, w)
    assert same([large], [canonical(N, K, leaves)])


@pytest.mark.parametrize("kind", SHAPES)
def test_neighbours_do_not_reach_a_row(kind):
    """NaN in every other row, and one ULP in one: the control that a row's own operands do reach it."""
    N, K, leaves = SHAPES[kind]
    x, w = operands(N, K)
    odd = np.arange(64) % 2 == 1
    dirty = np.asarray(run(jnp.where(odd[:, None], jnp.nan, x[:64]), w, leaves=leaves))
    assert np.isnan(dirty[1::2]).all() and same([dirty[::2]], [canonical(N, K, leaves)[:64:2]])
    changed = np.array(x[:64])
    changed.view(np.uint16)[7] ^= 1
    differs = bits(run(jnp.asarray(changed), w, leaves=leaves)) != bits(canonical(N, K, leaves)[:64])
    assert np.flatnonzero(differs.any(axis=1)).tolist() == [7]


def test_a_stack_is_indexed_in_place_and_rounded_once():
    N, K, leaves = SHAPES["tree"]
    x, w = operands(N, K)
    stack = jnp.stack([w * 0, w, w * jnp.bfloat16(jnp.nan)])
    at = lambda layer: run(x[:9], stack, jnp.int32(layer), leaves=leaves, out_dtype=jnp.bfloat16)  # noqa: E731
    assert same([at(1)], [jnp.asarray(canonical(N, K, leaves)[:9]).astype(jnp.bfloat16)])
    assert not np.asarray(at(0), np.float32).any() and np.isnan(np.asarray(at(2), np.float32)).all()


def test_padded_vocabulary():
    N, K, columns = 151936, 128, 152576
    x, w = operands(N, K)
    y = np.asarray(run(x[:9], w, leaves=1, columns=columns, fill=-float("inf")))
    assert np.isneginf(y[:, N:]).all() and same([y[:, N - 1096 : N]], [run(x[:9], w[N - 1096 :], leaves=1)])


@pytest.mark.parametrize("kind", SHAPES)
def test_no_less_accurate_than_the_library(kind):
    """In bf16, as a model's GEMMs round. In fp32 one chain over K is off by more than a library's split K is: see
    tests/gpu/test_gemm.py."""
    N, K, leaves = SHAPES[kind]
    x, w = operands(N, K)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    library = jax.jit(lambda x, w: jnp.dot(x, w.T))(x, w)
    ours = jnp.asarray(canonical(N, K, leaves)).astype(jnp.bfloat16)
    ours, theirs = errors(f"{kind}, bf16, {x.shape[0]} x {N} x {K}", ours, library, exact)
    assert ours <= theirs * 1.001


def test_inside_a_loop_of_layers():
    """Kernels back to back on the device, each started before the last one's end: each sees the last one's result."""
    K, L = 1024, 6
    rng = np.random.default_rng(0)
    x, stack = spread(rng, 8, K, binades=1), spread(rng, L, K, K, binades=1) * jnp.bfloat16(0.03)
    step = lambda layer, x: small_gemm(x, stack, layer, 8, jnp.bfloat16)  # noqa: E731
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, L, lambda i, x: step(i, step(L - 1 - i, x)), x))(x)
    y = x
    for i in range(L):
        for layer in (L - 1 - i, i):
            y = jax.block_until_ready(run(y, stack[layer], leaves=8, out_dtype=jnp.bfloat16))
    assert same([looped], [y]) and np.isfinite(np.asarray(y, np.float32)).all()
