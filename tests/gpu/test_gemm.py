"""The Hopper GEMM's bits on the GPU: a row's are its own in any batch, at any place, under any schedule, in any launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import gemm
from pallas_kernels.gemm import hopper, hopper_large, schedules
from pallas_kernels.gemm.schedules import Schedule
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import bits, differ, errors

CANONICAL = Schedule(128, 64, steps=2, in_flight=0)
"""No table picks it: what every schedule is compared with."""

T, N, K = 4096, 1536, 1024


@functools.cache
def operands(T=T, N=N, K=K, seed=0):
    """Values over 16 binades, so that another order of summation gives another sum."""

    def wide(i, *shape):
        a, b = jax.random.split(jax.random.key(seed * 2 + i))
        return (jax.random.normal(a, shape) * jnp.exp2(jax.random.randint(b, shape, -8, 8))).astype(jnp.bfloat16)

    return wide(0, T, K), wide(1, N, K)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def run(x, value, layer=None, leaves=1, out_dtype=jnp.float32, padded_N=None):
    return hopper.gemm(x, value, layer, leaves, "column", out_dtype, padded_N)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def scheduled(x, w, leaves, schedule, out_dtype=jnp.float32):
    epilogue = hopper_large.store(x.shape[0], w.shape[0], out_dtype, schedule)
    return hopper_large.matmul(x, w, None, leaves, w.shape[0], epilogue, schedule)[0]


@functools.cache
def canonical(leaves: int) -> np.ndarray:
    return np.asarray(scheduled(*operands(), leaves, CANONICAL))


def entries(tree: bool) -> list[Schedule]:
    return schedules.every("tree" if tree else "chain")


@pytest.mark.parametrize("leaves, schedule", [(1, s) for s in entries(False)] + [(8, s) for s in entries(True)])
def test_every_schedule_of_the_table_has_the_canonical_bits(leaves, schedule):
    assert differ(scheduled(*operands(), leaves, schedule), canonical(leaves)) == 0


@pytest.mark.parametrize("leaves, rows", [(1, 1), (1, 13), (1, 64), (1, 264), (1, 2048), (8, 13), (8, 64), (8, 256), (8, 2048)])
def test_a_row_has_its_own_bits_in_any_batch(leaves, rows):
    """Few rows run with the weight as the left operand, many with x: the same bits; so do other places in a tile."""
    x, w = operands()
    pick = np.random.default_rng(rows).permutation(T)[:rows]
    assert differ(run(x[pick], w, None, leaves), canonical(leaves)[pick]) == 0


@pytest.mark.parametrize("rows", [64, 2048])
def test_nan_in_the_neighbours(rows):
    x, w = operands()
    odd = jnp.arange(rows)[:, None] % 2 == 1
    dirty = np.asarray(run(jnp.where(odd, jnp.nan, x[:rows]).astype(jnp.bfloat16), w))
    assert np.isnan(dirty[1::2]).all()
    assert differ(dirty[::2], canonical(1)[:rows:2]) == 0


@pytest.mark.parametrize("rows, n", [(64, 8), (300, 576), (64, 1000), (300, 1000)])
def test_ragged_columns(rows, n):
    x, w = operands()
    assert differ(run(x[:rows], w[:n]), canonical(1)[:rows, :n]) == 0


@pytest.mark.parametrize("k", [64, 576])
def test_odd_lengths_of_K(k):
    x, w = operands()
    x, w = x[:300, :k], w[:, :k]
    y = run(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    assert np.max(np.abs(y - exact) / scale) < k * 2**-23
    assert differ(run(x[:64], w), y[:64]) == 0


@pytest.mark.parametrize("rows", [64, 2048])
def test_a_layer_of_a_stack(rows):
    x, w = operands()
    stack = jnp.stack([w[:, ::-1], jnp.full_like(w, jnp.nan), w])
    for layer, want in ((2, canonical(1)[:rows]), (0, run(x[:rows], w[:, ::-1]))):
        assert differ(run(x[:rows], stack, jnp.int32(layer)), want) == 0


@pytest.mark.parametrize("rows", [64, 2048])
def test_leaves_in_launches_of_their_own(rows):
    """A rank that owns a contiguous share of the leaves owns a subtree."""
    x, w = operands()
    x, size = x[:rows], K // 8
    parts = [run(x[:, i * size : (i + 1) * size], w[:, i * size : (i + 1) * size]) for i in range(8)]
    in_order = functools.reduce(jnp.add, parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert differ(parts[0], canonical(8)[:rows]) == 0
    halves = [run(x[:, i * K // 2 : (i + 1) * K // 2], w[:, i * K // 2 : (i + 1) * K // 2], None, 4) for i in range(2)]
    assert differ(halves[0] + halves[1], canonical(8)[:rows]) == 0
    assert differ(in_order, canonical(8)[:rows]) > 0, "operands that do not reveal the order"
    assert differ(canonical(1), canonical(8)) > 0


@pytest.mark.parametrize("rows", [64, 2048])
def test_columns_past_the_weight_are_minus_infinity(rows):
    x, w = operands()
    y = run(x[:rows], w[:1000], None, 1, jnp.float32, 2048)
    assert np.array_equal(np.asarray(y[:, 1000:]), np.full((rows, 1048), -np.inf, np.float32))
    assert differ(y[:, :1000], canonical(1)[:rows, :1000]) == 0


@pytest.mark.parametrize("leaves", [1, 8])
def test_bf16_is_the_fp32_sum_rounded_once(leaves):
    x, w = operands()
    for rows in (64, T):
        want = jnp.asarray(canonical(leaves)[:rows].view(np.float32)).astype(jnp.bfloat16)
        assert differ(run(x[:rows], w, None, leaves, jnp.bfloat16), want) == 0


def test_runs_and_duplicate_rows_are_equal():
    x, w = operands()
    first = run(x, w)
    assert all(differ(run(x, w), first) == 0 for _ in range(3))
    doubled = run(jnp.repeat(x[:1024], 2, axis=0), w)
    assert differ(doubled[::2], doubled[1::2]) == 0 and differ(doubled[::2], first[:1024]) == 0


def test_control_one_bit_of_an_operand_is_seen():
    x, w = operands()
    flipped = lax.bitcast_convert_type(lax.bitcast_convert_type(x[7], jnp.uint16) ^ 1, jnp.bfloat16)
    rows = np.flatnonzero((bits(run(x.at[7].set(flipped), w)) != bits(canonical(1))).any(axis=1))
    assert rows.tolist() == [7]


def normal(rows: int, n: int):
    x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in ((7, (rows, 4096)), (8, (n, 4096))))
    return x, w, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@pytest.mark.parametrize("leaves", [1, 8])
def test_no_less_accurate_than_the_library(leaves):
    x, w, exact = normal(2048, 1024)
    library = lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    what = f"{leaves} leaves over K 4096, bf16, 2048 rows"
    ours, theirs = errors(what, run(x, w, None, leaves, jnp.bfloat16), library, exact)
    assert ours <= theirs * 1.001


@pytest.mark.parametrize("rows", [64, 2048])
def test_accuracy_of_fp32_sums(rows):
    """Tensor cores cut low bits at each addition: one chain over 4096 is off by 4e-6. The library, where it cuts K over
    programs, comes closer (2e-6 at 2048 rows of these), and so does a tree."""
    x, w, exact = normal(rows, 512)
    library = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    what = "leaves over K 4096, fp32 result (of the logits alone)"
    chain, tree = (errors(f"{n} {what}, {rows} rows", run(x, w, None, n), library, exact)[0] for n in (1, 8))
    assert tree < chain < 6e-6


def test_gradients_are_the_same_run_after_run():
    x, w = operands()
    w = w[:512]
    master = w.astype(jnp.float32)

    @jax.jit
    def gradients(x, w, master):
        def loss(x, master):
            y = gemm.chain(x, Weight(w, None, master), region="r", impl="hopper")
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

        return jax.grad(loss, argnums=(0, 1))(x, master)

    first = gradients(x, w, master)
    assert first[0].dtype == jnp.bfloat16 and first[1].dtype == jnp.float32
    for _ in range(5):
        assert all(differ(a, b) == 0 for a, b in zip(gradients(x, w, master), first, strict=True))
    dy = jnp.cos(jnp.arange(T * 512, dtype=jnp.float32)).reshape(T, 512).astype(jnp.bfloat16)
    exact = np.asarray(dy, np.float64).T @ np.asarray(x, np.float64)
    assert np.linalg.norm(np.asarray(first[1], np.float64) - exact) / np.linalg.norm(exact) < 1e-5
