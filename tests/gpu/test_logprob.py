"""The Hopper log-probability on the GPU: training's bits are decode's, a row's are its own, float64 is near."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import logprob
from pallas_kernels.gemm import schedules
from pallas_kernels.gemm.schedules import Schedule
from pallas_kernels.logprob import hopper, hopper_blocks, hopper_combine
from pallas_kernels.weight import Weight

T, D = 4096, 320
VOCABULARIES = (1000, 32000, 49152, 151936)


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


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def differ(a, b) -> int:
    return int((bits(a) != bits(b)).sum())


def picked(V: int, pick) -> tuple[jax.Array, ...]:
    x, w, targets, inv_temp = operands(V)
    return x[pick], w, targets[pick], inv_temp[pick]


@pytest.mark.parametrize("V", VOCABULARIES)
def test_decode_has_the_bits_of_training(V):
    """At other places and in other numbers, so that a row lies in other tiles of other kernels."""
    assert np.isfinite(whole(V)).all() and (whole(V) <= 0).all()
    for n in (1, 2, 8, 13, 64, 257, 1024):
        pick = np.random.default_rng(n).permutation(T)[:n]
        assert differ(decode(*picked(V, pick)), whole(V)[pick]) == 0, n


@pytest.mark.parametrize("V", [1000, 49152])
def test_training_in_any_number_of_rows(V):
    for n in (1, 7, 8, 100, 129, 1000):
        pick = np.random.default_rng(n).permutation(T)[:n]
        assert differ(train(*picked(V, pick)), whole(V)[pick]) == 0, n


def test_control_the_library_has_no_such_bits():
    pick = np.random.default_rng(64).permutation(T)[:64]
    library = np.asarray(decode(*operands(49152), "native"))[pick]
    assert differ(decode(*picked(49152, pick), "native"), library) > 0


@pytest.mark.parametrize("V", [1000, 49152])
def test_nan_in_the_neighbours_and_duplicates(V):
    x, w, targets, inv_temp = operands(V)
    odd = jnp.arange(T) % 2 == 1
    dirty = np.asarray(train(jnp.where(odd[:, None], jnp.nan, x), w, targets, inv_temp))
    assert differ(dirty[::2], whole(V)[::2]) == 0 and np.isnan(dirty[1::2]).all()
    seven = np.full(300, 7)
    assert differ(train(*picked(V, seven)), whole(V)[seven]) == 0
    z = jax.jit(hopper.logits)(x[:64], w).at[1::2].set(jnp.nan)
    dirty = np.asarray(reduce(z, targets[:64], inv_temp[:64])[0])
    assert differ(dirty[::2], whole(V)[:64:2]) == 0 and np.isnan(dirty[1::2]).all()


def test_one_nan_or_one_changed_logit_is_seen():
    x, w, targets, inv_temp = operands(1000)
    z = np.array(jax.jit(hopper.logits)(x[:64], w))
    before = np.asarray(reduce(z, targets[:64], inv_temp[:64])[0])
    z[5, 999] = np.nan
    top = z[9].argmax()
    z[9, top] = np.nextafter(z[9, top], np.float32(np.inf))
    after = np.asarray(reduce(z, targets[:64].at[9].set(top), inv_temp[:64])[0])
    plain = np.asarray(reduce(jax.jit(hopper.logits)(x[:64], w), targets[:64].at[9].set(top), inv_temp[:64])[0])
    assert np.isnan(after[5])
    assert np.flatnonzero(bits(after) != bits(plain)).tolist() == [5, 9]
    assert np.flatnonzero(bits(before) != bits(plain)).tolist() == ([] if int(targets[9]) == top else [9])


SCHEDULES = [
    Schedule(128, 256),
    Schedule(256, 128),
    Schedule(128, 256, split="n", steps=3),
    Schedule(128, 256, cluster=(2, 1)),
    Schedule(128, 256, cluster=(1, 2), band=3, band_of="n", in_flight=0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_schedule_does_not_reach_the_bits(monkeypatch, schedule):
    asked = []
    monkeypatch.setattr(schedules, "large", lambda *_: asked.append(schedule) or schedule)
    for V in (1000, 49152):
        assert differ(jax.jit(hopper.forward)(*operands(V))[0], whole(V)) == 0
    assert asked


def test_with_a_gradient_remat_and_compiled_anew():
    x, w, targets, inv_temp = operands(32000)
    weights = jax.random.normal(jax.random.key(0), (T,))

    def loss(x, master, remat):
        run = lambda x: train.__wrapped__(x, Weight(w, None, master), targets, inv_temp)  # noqa: E731
        lp = (jax.checkpoint(run) if remat else run)(x)
        return jnp.sum(lp * weights), lp

    run = lambda remat: jax.jit(jax.value_and_grad(functools.partial(loss, remat=remat), (0, 1), has_aux=True))(  # noqa: E731
        x, w.astype(jnp.float32)
    )
    (_, lp), gradient = run(False)
    (_, again), other = run(True)
    jax.clear_caches()
    (_, anew), third = run(False)
    assert differ(lp, whole(32000)) == differ(again, whole(32000)) == differ(anew, whole(32000)) == 0
    for a, b, c in zip(gradient, other, third, strict=True):
        a, b, c = (np.asarray(g, np.float32) for g in (a, b, c))
        assert differ(a, b) == differ(a, c) == 0 and np.abs(a).max() > 0


def digest() -> str:
    """Of a vocabulary's bits."""
    return hashlib.sha256(bits(whole(32000)).tobytes()).hexdigest()


def test_two_processes():
    here = pathlib.Path(__file__)
    code = f"import runpy; print(runpy.run_path({str(here)!r})['digest']())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here.parents[2], env=dict(os.environ)
    )
    assert done.stdout.strip() == digest(), done.stderr


def ordered_lse(blocks: int, max_nP: np.ndarray, sum_nP: np.ndarray) -> np.ndarray:
    """The combination of block sums that the entry names, in numpy; a product and a sum in float64 are one fma."""
    f32 = np.float32
    fma = lambda x, y, z: (x.astype(np.float64) * np.float64(f32(y)) + z).astype(f32)  # noqa: E731

    def join(a, b):
        top = np.maximum(a[0], b[0])
        return top, np.ldexp(a[1], (a[0] - top).astype(int)) + np.ldexp(b[1], (b[0] - top).astype(int))

    terms = [(m, s.astype(f32)) for m, s in zip(max_nP, sum_nP, strict=True)]
    terms = [functools.reduce(join, terms[i : i + blocks // 8]) for i in range(0, blocks, blocks // 8)]
    while len(terms) > 1:
        terms = [join(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    top, total = terms[0]
    m, k = np.frexp(total * f32(2.0**-hopper_blocks.FIXED_POINT_BITS))
    low = m * 2 < f32(4 / 3)
    f, k = np.where(low, 2 * m, m).astype(f32) - f32(1), np.where(low, k - 1, k)
    series = np.full_like(f, hopper_combine.LOG1P[-1])
    for c in hopper_combine.LOG1P[-2::-1]:
        series = (series.astype(np.float64) * f + np.float64(f32(c))).astype(f32)
    log = fma(k.astype(f32), hopper_combine.LN2, ((f * f).astype(np.float64) * series + f).astype(f32))
    return fma(top, hopper_combine.NATS_HIGH, fma(top, hopper_combine.NATS_LOW, log))


def test_it_sums_in_the_order_that_its_entry_names():
    x, w, _, inv_temp = (a[:1024] if a.shape[0] == T else a for a in operands(49152))
    z = jax.jit(hopper.logits)(x, w)
    top, total = map(np.asarray, jax.jit(hopper_blocks.block_stats)(z, inv_temp))
    got = np.asarray(reduce(z, jnp.zeros(1024, jnp.int32), inv_temp)[1])
    assert differ(got, ordered_lse(len(top), top, total)) == 0
    turned = [y.reshape(8, -1, 1024)[:, ::-1].reshape(y.shape) for y in (top, total)]
    assert differ(got, ordered_lse(len(top), *turned)) > 0  # the rows tell orders apart


def exact(z, targets, inv_temp) -> np.ndarray:
    s = np.asarray(z, np.float64) * np.asarray(inv_temp, np.float64)[:, None]
    top = s.max(1, keepdims=True)
    return s[np.arange(len(s)), targets] - (np.log(np.exp(s - top).sum(1)) + top[:, 0])


@jax.jit
def library(z, targets, inv_temp):
    return jnp.take_along_axis(jax.nn.log_softmax(z * inv_temp[:, None], axis=1), targets[:, None], axis=1)[:, 0]


LOGITS = {
    "as a model's": lambda key, shape: jax.random.normal(key, shape) * 3,
    "wide": lambda key, shape: jax.random.normal(key, shape) * 40,
    "far from 0": lambda key, shape: jax.random.normal(key, shape) * 3 + 200,
    "all equal": lambda key, shape: jnp.full(shape, 7.3),
    "one hot": lambda key, shape: jax.random.normal(key, shape).at[:, 3].add(60.0),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("V", [1024, 151936])
def test_no_less_accurate_than_the_library(kind, V):
    B = 64
    z = LOGITS[kind](jax.random.key(1), (B, V))
    padded = jnp.pad(z, ((0, 0), (0, logprob.padded_vocab(V) - V)), constant_values=-jnp.inf)
    targets = jnp.where(
        jnp.arange(B) % 2 == 0, jnp.argmax(z, axis=1), jax.random.randint(jax.random.key(2), (B,), 0, V)
    )
    inv_temp = jnp.where(jnp.arange(B) < 32, 1.0, jnp.float32(1 / 0.7))
    want = exact(z, targets, inv_temp)
    ours, theirs = (
        np.abs(np.asarray(y, np.float64) - want)
        for y in (reduce(padded, targets, inv_temp)[0], library(z, targets, inv_temp))
    )
    # To the rounding of the result itself, and of logarithms of sums up to V.
    spacing = np.spacing(np.abs(want).astype(np.float32)) / 2 + 2.0**-23
    assert np.sqrt((ours**2).mean()) <= np.sqrt((theirs**2).mean()) + 1e-7
    assert (ours <= 4 * spacing).all()


def test_extreme_logits():
    z = jnp.full((8, 1024), -jnp.inf).at[:, :4].set(jnp.array([1e4, -1e4, 1e4, -1e4]))
    lp = np.asarray(reduce(z, jnp.arange(8) % 4, jnp.ones(8))[0])
    np.testing.assert_allclose(lp, np.where(np.arange(8) % 2 == 0, -np.log(2), -2e4 - np.log(2)), rtol=1e-6, atol=2e-3)
    assert np.isneginf(np.asarray(reduce(z, jnp.full(8, 9), jnp.ones(8))[0])).all()


def test_the_gradient_is_no_less_accurate_than_the_librarys():
    V, n = 1000, 512
    x, w, targets, inv_temp = picked(V, slice(0, n))
    g = jax.random.normal(jax.random.key(3), (n,))
    loss = lambda x, w, impl: jnp.sum(train.__wrapped__(x, w, targets, inv_temp, impl) * g)  # noqa: E731
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T * np.asarray(inv_temp, np.float64)[:, None]
    p = np.exp(z - z.max(1, keepdims=True))
    dz = (np.eye(V)[targets] - p / p.sum(1, keepdims=True)) * np.asarray(g * inv_temp, np.float64)[:, None]
    want = dz @ np.asarray(w, np.float64), dz.T @ np.asarray(x, np.float64)
    ours, theirs = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, w, impl) for impl in ("hopper", "native"))
    for a, b, exactly in zip(ours, theirs, want, strict=True):
        a, b = (np.linalg.norm(np.asarray(y, np.float64) - exactly) / np.linalg.norm(exactly) for y in (a, b))
        assert a <= max(1.2 * b, 4e-3), (a, b)  # dz in bf16, as a library's operand would be
