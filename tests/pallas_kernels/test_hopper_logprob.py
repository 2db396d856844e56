"""The Hopper log-probability without a GPU: in the interpreter, with its race detector, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import logprob, mosaic, registry
from pallas_kernels.gemm import schedules
from pallas_kernels.gemm.schedules import Schedule
from pallas_kernels.logprob import hopper, hopper_blocks, hopper_combine, reference
from pallas_kernels.logprob.hopper_choice import Choice
from tests.pallas_kernels.base import bits, relative, same
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

T, V, D = 70, 1000, 64


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Three programs: each has several tiles, and the ring goes on from one to the next. A fused multiply-add rounds once
    in the interpreter too."""
    fused = mosaic.fma

    def fma(x, y, z, *layout):
        if not mosaic.interpreting():
            return fused(x, y, z, *layout)
        with jax.enable_x64(True):
            x, y, z = (jnp.asarray(v, jnp.float32).astype(jnp.float64) for v in (x, y, z))
            return (x * y + z).astype(jnp.float32)

    jax.clear_caches()  # no trace of another file's, and none for another file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "SMS", 3)
        patch.setattr(mosaic, "fma", fma)
        yield
    jax.clear_caches()


def interpreted(fn, *args):
    with mosaic.interpreted():
        out = jax.tree.map(np.asarray, jax.jit(fn)(*args))
    assert not gpu_callbacks.get_races().races_found
    return out


def rows(T=T, V=V, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((T, D)) * 2, jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((V, D)) * 0.3, jnp.bfloat16)
    inv_temp = np.float32(1) / rng.choice([0.7, 1.0, 1.3], T).astype(np.float32)
    return x, w, jnp.asarray(rng.integers(0, V, T), jnp.int32), jnp.asarray(inv_temp)


def logits(T=T, seed=1):
    z = np.random.default_rng(seed).standard_normal((T, 1024)) * 4
    z[:, 1000:] = -np.inf
    return jnp.asarray(z, jnp.float32)


def decode():
    """Logits, targets (every other one the likeliest), inverse temperatures."""
    z, (_, _, targets, inv_temp) = logits(), rows()
    return z, jnp.where(jnp.arange(T) % 2 == 0, jnp.argmax(z, axis=1), targets).astype(jnp.int32), inv_temp


@functools.cache
def whole():
    """(log-probability, log-sum-exp) of `decode()`."""
    return interpreted(hopper.reduce, *decode())


def test_logits_in_memory_against_float64_and_the_reference():
    z, targets, inv_temp = decode()
    lp, lse = whole()
    want_lp, want_lse = exact(z, targets, inv_temp)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6, rtol=0)
    np.testing.assert_allclose(lp, want_lp, atol=4e-6, rtol=0)
    for got, other in zip((lp, lse), reference.reduce(z, targets, inv_temp), strict=True):
        np.testing.assert_allclose(got, other, atol=8e-6, rtol=0)


def test_no_less_accurate_than_the_library_and_the_bits_that_the_entry_names():
    """Rows of every kind in one batch; two groups of blocks in an eighth, the second not full; pads."""
    per_kind, V, V8 = 8, 17 * 1024 + 900, 18 * 1024
    kinds = [np.asarray(make(jax.random.key(1), (per_kind, V))) for make in LOGITS.values()]
    z = np.concatenate(kinds)
    B = len(z)
    inv_temp = np.where(np.arange(B) % 4 < 2, 1, 1 / np.float32(0.7)).astype(np.float32)
    targets = np.where(np.arange(B) % 2 == 0, z.argmax(1), np.random.default_rng(0).integers(0, V, B)).astype(np.int32)
    padded = np.pad(z, ((0, 0), (0, V8 - V)), constant_values=-np.inf)

    target = z[np.arange(B), targets]

    def run(z, *of_rows):
        target, inv_temp = (jnp.pad(x, (0, 128 - B), constant_values=1) for x in of_rows)
        stats = hopper_blocks.block_stats(z, inv_temp)
        return *hopper_combine.combine(V8 // 128, *stats, target, inv_temp), *stats

    lp, lse, top, count = (y[..., :B] for y in interpreted(run, padded, target, inv_temp))
    assert same((lp, lse), combined(top, count, target, inv_temp))
    turned = [y.reshape(8, -1, B)[:, ::-1].reshape(y.shape) for y in (top, count)]
    assert not same((lp, lse), combined(*turned, target, inv_temp))  # the rows tell orders apart

    want, want_lse = exact(z, targets, inv_temp)
    theirs = library(z, targets, inv_temp)
    plain = target * inv_temp - lse
    failed = []
    for kind, at in zip(LOGITS, np.split(np.arange(B), len(LOGITS)), strict=True):
        ours, library_s, control = (error(y[at], want[at]) for y in (lp, theirs, plain))
        allowed = max(library_s * 1.05, rounding(want[at]))
        assert ours <= allowed, f"{kind}: {ours} against {library_s}"
        assert error(lse[at], want_lse[at]) <= rounding(want_lse[at]), kind
        failed += [kind] * (control > allowed)
    assert failed  # a difference of two large fp32 numbers does not pass


def test_more_groups_than_are_on_their_way_at_once():
    """Two programs' rows; the last group of an eighth is not full."""
    rng, P = np.random.default_rng(0), 2 * hopper_combine.ROWS
    blocks = 8 * (hopper_combine.STEPS * hopper_combine.GROUP + 5)
    top = rng.integers(-30, 1, (blocks, P)).astype(np.float32)
    stats = top, rng.integers(2**22, 2**27, (blocks, P)).astype(np.int32)
    target, inv_temp = (-rng.random(P) * 9).astype(np.float32), np.full(P, 1 / 0.7, np.float32)
    got = interpreted(functools.partial(hopper_combine.combine, blocks), *stats, target, inv_temp)
    assert same(got, combined(*stats, target, inv_temp))
    turned = [y.reshape(8, -1, P)[:, ::-1].reshape(y.shape) for y in stats]
    assert not same(got, combined(*turned, target, inv_temp))


@pytest.mark.parametrize("shares", [4, 13])
def test_a_choice_is_the_lowest_of_the_best_and_its_log_probability_that_of_a_target(shares):
    B, P, V = 37, 64, 1024
    *choice, best = offers(shares, B, P, V)
    rng = np.random.default_rng(0)
    stats = rng.integers(-30, 1, (8, P)).astype(np.float32), rng.integers(2**22, 2**27, (8, P)).astype(np.int32)
    inv_temp = np.full(P, 1 / 0.7, np.float32)
    lp, _, chosen = interpreted(lambda *of: hopper_combine.combine(8, *stats, Choice(*of), inv_temp), *choice)
    assert same([chosen[:B]], [best])
    want, _ = combined(*(x[:, :B] for x in stats), choice[2][np.arange(B), best], inv_temp[:B])
    assert same([lp[:B]], [want]) and not same([lp[:B]], [np.roll(want, 1)])


def test_a_blocks_sum_is_the_one_that_its_entry_names():
    z = powers()
    top, count = interpreted(hopper_blocks.block_stats, z, jnp.full(64, UNIT))
    assert (top == 0).all() and same(count, [counts(np.exp2(z))])
    assert not same(count, [counts(np.exp2(np.sort(z)))])  # the rows tell orders apart


def test_a_row_alone_among_others_and_beside_nan():
    z, targets, inv_temp = decode()
    assert same(interpreted(hopper.reduce, z[3:4], targets[3:4], inv_temp[3:4]), [y[3:4] for y in whole()])
    at = np.arange(69, 40, -1)
    odd = at % 2 == 1
    dirty = interpreted(hopper.reduce, jnp.where(odd[:, None], jnp.nan, z[at]), targets[at], inv_temp[at])
    assert same([y[~odd] for y in dirty], [y[at][~odd] for y in whole()])
    assert np.isnan(dirty[0][odd]).all()


def test_control_one_ulp_of_a_logit_reaches_its_row_and_no_other():
    z, targets, inv_temp = decode()
    row, z = plant(z, targets, whole()[0])
    after = interpreted(hopper.reduce, z, targets, inv_temp)[0]
    assert np.flatnonzero(bits(after) != bits(whole()[0])).tolist() == [row]


def test_what_threads_share_is_added_in_any_order():
    """Columns in one class modulo 8 are a thread's own; 8 sums, one a class, are integers."""
    z = np.array(logits(64))
    inv_temp = jnp.ones(64)
    before = interpreted(hopper_blocks.block_stats, z, inv_temp)
    moved = z.reshape(64, -1, 8)[..., np.random.default_rng(0).permutation(8)].reshape(z.shape)
    assert same(interpreted(hopper_blocks.block_stats, moved, inv_temp), before)
    swapped = z[:, np.r_[128:256, 0:128, 256:1024]]
    after = interpreted(hopper_blocks.block_stats, swapped, inv_temp)
    assert same([x[[1, 0]] for x in after], [x[:2] for x in before]) and not same(
        [x[:2] for x in after], [x[:2] for x in before]
    )


def test_exact_at_the_ends_and_never_positive():
    z = np.full((32, 1024), -np.inf, np.float32)
    z[:16, :3] = [0.0, -200.0, -np.inf]
    z[8:16, 5] = 88.0
    z[16:] = np.random.default_rng(1).standard_normal((16, 1024)) * 1e-3 + 40 * (np.arange(1024) == 7)
    targets = np.r_[[0, 1, 2, 0], [0, 1, 2, 1], [5] * 8, [7] * 16].astype(np.int32)
    lp = interpreted(hopper.reduce, z, targets, jnp.ones(32))[0]
    assert lp[:8].tolist() == [0, -200, -np.inf, 0, 0, -200, -np.inf, -200]
    np.testing.assert_allclose(lp[8:16], 0, atol=2e-7)
    assert (lp <= 0).all()


def test_training_has_the_bits_of_decode(monkeypatch):
    """Whichever way a tile is divided between warpgroups: its rows, its columns."""
    x, w, targets, inv_temp = rows()
    decoded = interpreted(lambda *a: hopper.reduce(hopper.logits(*a[:2]), *a[2:]), x, w, targets, inv_temp)
    for schedule in (Schedule(256, 128, steps=2), Schedule(64, 256, split="n", steps=2)):
        monkeypatch.setattr(schedules, "large", lambda *_, s=schedule: s)
        forward = lambda *a: hopper.forward(*a)  # noqa: E731 (a trace of its own for each schedule)
        assert same(interpreted(forward, x, w, targets, inv_temp), decoded), schedule


def test_gradient_against_float64(monkeypatch):
    monkeypatch.setattr("pallas_kernels.logprob.hopper_head.CHUNK", 512)  # chunks of 512 and a rest of 488
    x, w, targets, inv_temp = rows()
    g = jnp.asarray(np.random.default_rng(5).standard_normal(T), jnp.float32)
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    lse = exact(z, targets, inv_temp)[1]
    p = np.exp(z * np.asarray(inv_temp, np.float64)[:, None] - lse[:, None])
    dz = (np.eye(V)[targets] - p) * (np.asarray(g, np.float64) * np.asarray(inv_temp))[:, None]
    run = functools.partial(hopper.backward, dw_dtype=jnp.float32)
    dx, dw = interpreted(run, x, w, targets, inv_temp, jnp.asarray(lse, jnp.float32), g)
    assert dx.dtype == x.dtype and dw.dtype == np.float32
    assert relative(dx, dz @ np.asarray(w, np.float64)) < 5e-3
    assert relative(dw, dz.T @ np.asarray(x, np.float64)) < 5e-3


def test_the_gradient_never_holds_all_logits():
    T, V = 1024, 65536
    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((T, D), jnp.bfloat16), ((V, D), jnp.bfloat16), ((T,), jnp.int32))
    ]
    floats = [jax.ShapeDtypeStruct((T,), jnp.float32)] * 3
    text = (
        jax.jit(hopper.backward, static_argnums=6)
        .trace(*shapes, *floats, jnp.float32)
        .lower(lowering_platforms=("cuda",))
    )
    assert f"{T}x{V}x" not in text.as_text() and f"tensor<{T}x16384xbf16>" in text.as_text()


@pytest.mark.parametrize("T, V", [(1, 151936), (4096, 1000)])
def test_lowers_for_cuda(monkeypatch, T, V):
    monkeypatch.setattr(mosaic, "SMS", 132)
    bf16, f32, i32 = (lambda *s, d=d: jax.ShapeDtypeStruct(s, d) for d in (jnp.bfloat16, jnp.float32, jnp.int32))
    lower = lambda fn, *a: jax.jit(fn).trace(*a).lower(lowering_platforms=("cuda",)).as_text()  # noqa: E731
    head = bf16(T, 576), bf16(V, 576), i32(T), f32(T)
    assert lower(hopper.forward, *head).count("mosaic_gpu_v2") == 2
    assert lower(hopper.reduce, f32(T, logprob.padded_vocab(V)), *head[2:]).count("mosaic_gpu_v2") == 2


def test_what_it_cannot_serve_is_refused():
    x, w, targets, inv_temp = rows(8)
    call = lambda x, w: jax.eval_shape(hopper.forward, x, w, targets, inv_temp)  # noqa: E731
    with pytest.raises(registry.Unsupported, match="bfloat16"):
        call(x.astype(jnp.float32), w.astype(jnp.float32))
    with pytest.raises(registry.Unsupported, match="multiple of 8"):
        call(x, w[:13])
    with pytest.raises(registry.Unsupported, match="bfloat16"):
        hopper.logits(x.astype(jnp.float32), w.astype(jnp.float32))
