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
from tests.pallas_kernels.base import bits, relative, same, spread

T, V, D = 70, 1000, 64


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Three programs: each has several tiles, and the ring goes on from one to the next."""
    monkeypatch.setattr(mosaic, "SMS", 3)


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


def exact(z, inv_temp):
    s = np.asarray(z, np.float64) * np.asarray(inv_temp, np.float64)[:, None]
    top = s.max(1, keepdims=True)
    return s, np.log(np.exp(s - top).sum(1)) + top[:, 0]


def test_logits_in_memory_against_float64_and_the_reference():
    _, _, targets, inv_temp = rows()
    z = logits()
    lp, lse = interpreted(hopper.reduce, z, targets, inv_temp)
    s, want = exact(z, inv_temp)
    np.testing.assert_allclose(lse, want, atol=2e-6, rtol=0)
    np.testing.assert_allclose(lp, s[np.arange(T), targets] - want, atol=4e-6, rtol=0)
    for got, other in zip((lp, lse), reference.reduce(z, targets, inv_temp), strict=True):
        np.testing.assert_allclose(got, other, atol=8e-6, rtol=0)


def test_a_row_alone_among_others_and_beside_nan():
    _, _, targets, inv_temp = rows()
    z = logits()
    whole = interpreted(hopper.reduce, z, targets, inv_temp)
    for pick in ([3], list(range(69, 40, -1))):
        at = np.array(pick)
        assert same(interpreted(hopper.reduce, z[at], targets[at], inv_temp[at]), [y[at] for y in whole])
    odd = np.arange(T) % 2 == 1
    dirty = interpreted(hopper.reduce, jnp.where(odd[:, None], jnp.nan, z), targets, inv_temp)
    assert same([y[::2] for y in dirty], [y[::2] for y in whole])


def test_control_a_change_reaches_its_row_and_no_other():
    _, _, targets, inv_temp = rows()
    z = np.array(logits())
    before = interpreted(hopper.reduce, z, targets, inv_temp)
    z[7, targets[7]] += 1e-4
    after = interpreted(hopper.reduce, z, targets, inv_temp)
    assert np.flatnonzero(bits(before[0]) != bits(after[0])).tolist() == [7]


def test_the_order_inside_a_block_does_not_reach_the_bits():
    z = np.array(logits(64))
    inv_temp = jnp.ones(64)
    before = interpreted(hopper_blocks.block_stats, z, inv_temp)
    moved = z.reshape(64, 8, 128)[..., np.random.default_rng(0).permutation(128)].reshape(z.shape)
    assert same(interpreted(hopper_blocks.block_stats, moved, inv_temp), before)
    swapped = z[:, np.r_[128:256, 0:128, 256:1024]]
    after = interpreted(hopper_blocks.block_stats, swapped, inv_temp)
    assert same([x[[1, 0]] for x in after], [x[:2] for x in before]) and not same(
        [x[:2] for x in after], [x[:2] for x in before]
    )


def test_an_eighth_is_its_own_subtree():
    """Blocks are added in order inside an eighth, eighths in a balanced tree."""
    blocks = 16
    rng = np.random.default_rng(3)
    top = jnp.asarray(rng.integers(-4, 4, (blocks, 128)), jnp.float32)
    count = jnp.asarray(rng.integers(2**22, 2**30, (blocks, 128)), jnp.int32)
    target, inv_temp = jnp.zeros(128), jnp.ones(128)
    _, lse = interpreted(functools.partial(hopper_combine.combine, blocks), top, count, target, inv_temp)
    sums = np.asarray(count).astype(np.float32) * np.exp2(np.asarray(top))
    eighths = sums[::2] + sums[1::2]
    while len(eighths) > 1:
        eighths = eighths[::2] + eighths[1::2]
    np.testing.assert_allclose(lse, np.log(eighths[0].astype(np.float64) * 2.0**-23), atol=2e-6)
    # The same sums, as eight eighths of one block each.
    one = (jnp.full((8, 128), 5.0), jnp.asarray((sums[::2] + sums[1::2]) * 2.0**-5, jnp.int32))
    assert (
        np.abs(interpreted(functools.partial(hopper_combine.combine, 8), *one, target, inv_temp)[1] - lse).max() < 2e-6
    )


def test_exact_at_the_ends_and_never_positive():
    z = np.full((16, 1024), -np.inf, np.float32)
    z[:, :3] = [0.0, -200.0, -np.inf]
    z[8:, 5] = 88.0
    lp = lambda t: interpreted(hopper.reduce, jnp.asarray(z), jnp.full(16, t), jnp.ones(16))[0]  # noqa: E731
    assert (lp(0)[:8] == 0).all() and (lp(1)[:8] == -200).all() and np.isneginf(lp(2)).all()
    np.testing.assert_allclose(lp(5)[8:], 0, atol=2e-6)  # the interpreter has no fused multiply-add
    near = np.random.default_rng(1).standard_normal((16, 1024)) * 1e-3 + 40 * (np.arange(1024) == 7)
    assert (interpreted(hopper.reduce, near.astype(np.float32), jnp.full(16, 7), jnp.ones(16))[0] <= 0).all()
    far = spread(np.random.default_rng(2), 16, 1024, dtype=jnp.float32) + 1e4
    s, lse = exact(far, np.ones(16))
    np.testing.assert_allclose(interpreted(hopper.reduce, far, jnp.arange(16), jnp.ones(16))[0], s[np.arange(16), np.arange(16)] - lse, rtol=2e-3)  # fmt: skip


@pytest.mark.parametrize(
    "schedule",
    [Schedule(256, 128, steps=2), Schedule(64, 256, split="n", steps=2)],
    ids=["rows divided", "columns divided"],
)
def test_training_has_the_bits_of_decode(monkeypatch, schedule):
    x, w, targets, inv_temp = rows()
    decoded = interpreted(lambda *a: hopper.reduce(hopper.logits(*a[:2]), *a[2:]), x, w, targets, inv_temp)
    monkeypatch.setattr(schedules, "large", lambda *_: schedule)
    assert same(interpreted(hopper.forward, x, w, targets, inv_temp), decoded)


def test_gradient_against_float64(monkeypatch):
    monkeypatch.setattr("pallas_kernels.logprob.hopper_head.CHUNK", 512)  # chunks of 512 and a rest of 488
    x, w, targets, inv_temp = rows()
    g = jnp.asarray(np.random.default_rng(5).standard_normal(T), jnp.float32)
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    s, lse = exact(z, inv_temp)
    dz = (np.eye(V)[targets] - np.exp(s - lse[:, None])) * (np.asarray(g, np.float64) * np.asarray(inv_temp))[:, None]
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


@pytest.mark.parametrize("T, V", [(1, 151936), (70, 49152), (4096, 1000)])
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
