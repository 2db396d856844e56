"""The Hopper log-probability on the GPU: training's bits are decode's, a row's are its own, float64 is near."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import logprob
from pallas_kernels.gemm import schedules
from pallas_kernels.gemm.schedules import Schedule
from pallas_kernels.logprob import hopper, hopper_blocks, hopper_combine
from pallas_kernels.logprob.hopper_choice import Choice
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import bits, differ, errors, same
from tests.pallas_kernels.logprob_work import (
    LOGITS,
    UNIT,
    combined,
    counts,
    error,
    exact,
    library,
    offers,
    plant,
    powers,
    rounding,
)

T, D = 4096, 320


@functools.cache
def operands(V: int) -> tuple[jax.Array, ...]:
    """Rows, head, targets and inverse temperatures; logits over several binades, so that another order is another sum."""
    keys = jax.random.split(jax.random.key(V), 5)
    x = (jax.random.normal(keys[0], (T, D)) * jnp.exp2(jax.random.randint(keys[1], (T, D), -3, 3))).astype(jnp.bfloat16)
    w = (jax.random.normal(keys[2], (V, D)) * 0.1).astype(jnp.bfloat16)
    inv_temp = 1 / jnp.array([0.7, 1.0, 1.3, 0.25], jnp.float32)[jax.random.randint(keys[3], (T,), 0, 4)]
    return x, w, jax.random.randint(keys[4], (T,), 0, V, jnp.int32), inv_temp


@functools.partial(jax.jit, static_argnums=4)
def train(x, w, targets, inv_temp, impl="hopper"):
    return logprob.logprob(x, w, targets, inv_temp, regions=("a", "b"), impl=impl)


@functools.partial(jax.jit, static_argnums=4)
def decode(x, w, targets, inv_temp, impl="hopper"):
    z = logprob.logits(x, w, region="a", impl=impl)
    return logprob.from_logits(z, targets, inv_temp, region="b", impl=impl)


reduce = jax.jit(hopper.reduce)


@functools.cache
def whole(V: int) -> np.ndarray:
    return np.asarray(train(*operands(V)))


def picked(V: int, pick) -> tuple[jax.Array, ...]:
    x, w, targets, inv_temp = operands(V)
    return x[pick], w, targets[pick], inv_temp[pick]


@pytest.mark.parametrize("V", [1000, 49152, 151936])
def test_decode_has_the_bits_of_training(V):
    """At other places and in other numbers, so that a row lies in other tiles of other kernels."""
    assert np.isfinite(whole(V)).all() and (whole(V) <= 0).all()
    for n in (1, 8, 257) if V == 1000 else (257,):
        pick = np.random.default_rng(n).permutation(T)[:n]
        assert differ(decode(*picked(V, pick)), whole(V)[pick]) == 0, n


def test_a_ragged_number_of_rows():
    pick = np.random.default_rng(100).permutation(T)[:100]
    assert differ(train(*picked(1000, pick)), whole(1000)[pick]) == 0


def test_nan_in_the_neighbours_duplicates_and_one_changed_logit():
    x, w, targets, inv_temp = operands(1000)
    odd = jnp.arange(T) % 2 == 1
    dirty = np.asarray(train(jnp.where(odd[:, None], jnp.nan, x), w, targets, inv_temp))
    assert differ(dirty[::2], whole(1000)[::2]) == 0 and np.isnan(dirty[1::2]).all()
    seven = np.full(T, 7)
    assert differ(train(*picked(1000, seven)), whole(1000)[seven]) == 0
    z = np.array(jax.jit(hopper.logits)(x[:64], w))
    other = jnp.asarray((z[:, :1000].argmax(1) + 1) % 1000, jnp.int32)
    plain = np.asarray(reduce(z, other, inv_temp[:64])[0])
    spoilt = np.where(np.arange(64)[:, None] % 2 == 1, np.float32(np.nan), z)
    dirty = np.asarray(reduce(spoilt, other, inv_temp[:64])[0])
    assert differ(dirty[::2], plain[::2]) == 0 and np.isnan(dirty[1::2]).all()
    z[5, 999] = np.nan
    z[9, other[9]] += 0.01
    after = np.asarray(reduce(z, other, inv_temp[:64])[0])
    assert np.isnan(after[5]) and np.flatnonzero(bits(after) != bits(plain)).tolist() == [5, 9]


SCHEDULES = [
    Schedule(128, 256, split="n", steps=3),
    Schedule(128, 256, cluster=(1, 2), band=3, band_of="n", in_flight=0),
]


def test_a_schedule_does_not_reach_the_bits(monkeypatch):
    for schedule in SCHEDULES:
        asked = []
        monkeypatch.setattr(schedules, "large", lambda *_, s=schedule, asked=asked: asked.append(s) or s)
        assert differ(jax.jit(lambda *a: hopper.forward(*a)[0])(*operands(1000)), whole(1000)) == 0, schedule
        assert asked


def test_with_a_gradient_and_remat():
    """The forward's bits; the gradient's from run to run; its accuracy beside the library's."""
    V = 1000
    x, w, targets, inv_temp = operands(V)
    g = jax.random.normal(jax.random.key(3), (T,))

    def loss(x, master, impl):
        run = lambda x: train.__wrapped__(x, Weight(w, None, master), targets, inv_temp, impl)  # noqa: E731
        lp = jax.checkpoint(run)(x)
        return jnp.sum(lp * g), lp

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (_, lp), ours = run(x, w.astype(jnp.float32), "hopper")
    _, again = run(x, w.astype(jnp.float32), "hopper")
    _, theirs = run(x, w.astype(jnp.float32), "native")
    assert differ(lp, whole(V)) == 0
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T * np.asarray(inv_temp, np.float64)[:, None]
    p = np.exp(z - z.max(1, keepdims=True))
    dz = (np.eye(V)[targets] - p / p.sum(1, keepdims=True)) * np.asarray(g * inv_temp, np.float64)[:, None]
    want = dz @ np.asarray(w, np.float64), dz.T @ np.asarray(x, np.float64)
    for mine, twice, other, exactly in zip(ours, again, theirs, want, strict=True):
        mine, twice, other = (np.asarray(y, np.float32) for y in (mine, twice, other))
        assert differ(mine, twice) == 0
        mine, other = (np.linalg.norm(y - exactly) / np.linalg.norm(exactly) for y in (mine, other))
        assert mine <= max(1.2 * other, 4e-3), (mine, other)  # dz in bf16, as a library's operand would be


def test_a_blocks_sum_is_the_one_that_its_entry_names():
    z = powers()
    top, count = (np.asarray(y) for y in hopper_blocks.block_stats(z, jnp.full(64, UNIT)))
    assert (top == 0).all() and same(count, [counts(np.exp2(z))])
    assert not same(count, [counts(np.exp2(np.sort(z)))])  # the rows tell orders apart


def test_it_sums_in_the_order_that_its_entry_names():
    B = 64
    z, inv_temp = jax.random.normal(jax.random.key(0), (B, 48 * 1024)) * 3, jnp.full(128, 1 / 0.7, jnp.float32)
    targets = jnp.where(jnp.arange(B) % 2 == 0, jnp.argmax(z, axis=1), 0)
    target = z[jnp.arange(B), targets]
    stats = [np.asarray(y)[:, :B] for y in hopper_blocks.block_stats(z, inv_temp)]
    got = reduce(z, targets, inv_temp[:B])
    assert same(got, combined(*stats, target, inv_temp[:B]))
    turned = [y.reshape(8, -1, B)[:, ::-1].reshape(y.shape) for y in stats]
    assert not same(got, combined(*turned, target, inv_temp[:B]))  # the rows tell orders apart


@pytest.mark.parametrize("P", [32, 256, 8192])
def test_more_groups_than_are_on_their_way_at_once(P):
    """Sums in the entry's order of as many groups as a large vocabulary has, the last of an eighth not full."""
    rng, blocks = np.random.default_rng(P), logprob.padded_vocab(151936) // 128
    top = rng.integers(-30, 1, (blocks, P)).astype(np.float32)
    stats = top, rng.integers(2**22, 2**27, (blocks, P)).astype(np.int32)
    target, inv_temp = (-rng.random(P) * 9).astype(np.float32), np.full(P, 1 / 0.7, np.float32)
    got = hopper_combine.combine(blocks, *stats, target, inv_temp)
    assert same(got, combined(*stats, target, inv_temp))
    turned = [y.reshape(8, -1, P)[:, ::-1].reshape(y.shape) for y in stats]
    assert not same(got, combined(*turned, target, inv_temp))  # the rows tell orders apart


@pytest.mark.parametrize("shares, P", [(4, 4096), (66, 256), (264, 64)])
def test_a_choice_is_the_lowest_of_the_best_and_its_log_probability_that_of_a_target(shares, P):
    B, V = P - 7, 32768
    *choice, best = offers(shares, B, P, V)
    rng = np.random.default_rng(0)
    stats = rng.integers(-30, 1, (V // 128, P)).astype(np.float32), rng.integers(2**22, 2**27, (V // 128, P)).astype(np.int32)
    inv_temp = np.full(P, 1 / 0.7, np.float32)
    lp, _, chosen = hopper_combine.combine(V // 128, *stats, Choice(*map(jnp.asarray, choice)), inv_temp)
    assert same([chosen[:B]], [best])
    want, _ = combined(*(x[:, :B] for x in stats), choice[2][np.arange(B), best], inv_temp[:B])
    assert same([lp[:B]], [want]) and not same([lp[:B]], [np.roll(want, 1)])


@pytest.mark.parametrize("V", [1024, 151936])
def test_no_less_accurate_than_the_library(V):
    B = 64
    inv_temp = jnp.where(jnp.arange(B) < 32, 1.0, jnp.float32(1 / 0.7))
    for kind, make in LOGITS.items():
        z = make(jax.random.key(1), (B, V))
        padded = jnp.pad(z, ((0, 0), (0, logprob.padded_vocab(V) - V)), constant_values=-jnp.inf)
        others = jax.random.randint(jax.random.key(2), (B,), 0, V)
        targets = jnp.where(jnp.arange(B) % 2 == 0, jnp.argmax(z, axis=1), others).astype(jnp.int32)
        want, _ = exact(z, targets, inv_temp)
        found = reduce(padded, targets, inv_temp)[0], library(z, targets, inv_temp)
        errors(f"{kind} logits, vocabulary {V}", *found, want)
        ours, theirs = (error(y, want) for y in found)
        assert ours <= max(theirs, rounding(want)), f"{kind}: {ours} against {theirs}"


@pytest.mark.parametrize("V, D", [(151936, 4096), (151936, 1024), (49152, 576)])
def test_logits_are_no_less_accurate_than_the_librarys(V, D):
    """Of 8B, 0.6B and SmolLM2: the one result of a GEMM that stays fp32. By 500 columns in float64. The library gives a row by itself to
    a kernel for vectors, with another and smaller error; ours has the bits that it has in a batch."""
    x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in ((7, (2048, D)), (8, (V, D))))
    some = np.sort(np.random.default_rng(0).permutation(V)[:500])
    exactly = np.asarray(x, np.float64) @ np.asarray(w[some], np.float64).T
    library = jax.jit(functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))
    for rows in (1, 8, 64, 256, 2048):
        ours, theirs = (y[:, some] for y in (jax.jit(hopper.logits)(x[:rows], w), library(x[:rows], w)))
        mine, other = errors(f"logits, fp32, {rows} rows, {V} x {D}", ours, theirs, exactly[:rows])
        assert mine <= 1.001 * other or rows == 1, (rows, mine, other)
    assert differ(jax.jit(hopper.logits)(x[:1], w), jax.jit(hopper.logits)(x[:8], w)[:1]) == 0


def test_control_one_ulp_of_a_logit_reaches_its_row_and_no_other():
    z = jax.random.normal(jax.random.key(1), (64, 48 * 1024)) * 3
    targets = jnp.argmax(z, axis=1).astype(jnp.int32)
    before = np.asarray(reduce(z, targets, jnp.ones(64))[0])
    row, z = plant(z, targets, before)
    after = reduce(z, targets, jnp.ones(64))[0]
    assert np.flatnonzero(bits(after) != bits(before)).tolist() == [row]


def test_extreme_logits():
    z = jnp.full((8, 1024), -jnp.inf).at[:, :4].set(jnp.array([1e4, -1e4, 1e4, -1e4]))
    lp = np.asarray(reduce(z, jnp.arange(8) % 4, jnp.ones(8))[0])
    np.testing.assert_allclose(lp, np.where(np.arange(8) % 2 == 0, -np.log(2), -2e4 - np.log(2)), rtol=1e-6, atol=2e-3)
    assert np.isneginf(np.asarray(reduce(z, jnp.full(8, 9), jnp.ones(8))[0])).all()
