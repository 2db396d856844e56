"""The Hopper row kernels' bits on the GPU: norms, rope and silu * up give a row its own bits in any batch, schedule and launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import qk_norm_rope, rms_norm, silu_mul
from pallas_kernels.qk_norm_rope import hopper as rope
from pallas_kernels.rms_norm import hopper as norm
from pallas_kernels.silu_mul import hopper as silu
from tests.pallas_kernels.base import bits, errors, same

EPS, THETA, MOST = 1e-6, 1e6, 4096
T = 4096
CASES = {
    "norm 4096": ((4096,),),
    "add norm 576": ((576,), (576,)),
    "add norm 8192": ((8192,), (8192,)),
    "rope 64": ((3, 5, 64), "positions"),
    "rope 128": ((8, 6, 128), "positions"),
    "silu 1544": ((2 * 1544,),),
}
"""Shape of a row of each operand. Each (case, number of rows) is a compilation of a second or two: few of them, of many rows."""
ONE_OF_EACH = ("add norm 576", "rope 128", "silu 1544")


@functools.cache
def rows(name: str) -> tuple[np.ndarray, ...]:
    """T rows of each operand over 16 binades, so that another order of summation gives another sum."""
    rng = np.random.default_rng(len(name))

    def operand(shape):
        if shape == "positions":
            return rng.integers(0, MOST, T, np.int32)
        random = rng.integers(0, 2**16, (T, *shape), np.uint16)
        return (random & 0x87FF) + np.uint16(119 << 7)  # sign, 4 bits of exponent from 119 on, 7 bits of mantissa

    return tuple(x if x.dtype != np.uint16 else x.view(jnp.bfloat16) for x in map(operand, CASES[name]))


def weight(D: int, seed: int = 9) -> jax.Array:
    return jnp.asarray(1 + 0.3 * np.random.default_rng(seed).standard_normal(D), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 1))
def op(name: str, impl: str, *arrays) -> tuple[jax.Array, ...]:
    x = arrays[0]
    if name.startswith("rope"):
        norms = weight(x.shape[-1], 1), weight(x.shape[-1], 2)
        return qk_norm_rope.qk_norm_rope(
            *arrays, *norms, eps=EPS, theta=THETA, max_positions=MOST, region="r", impl=impl
        )
    if name.startswith("silu"):
        return (silu_mul.silu_mul(x, region="r", impl=impl),)
    run = rms_norm.add_rms_norm if name.startswith("add") else rms_norm.rms_norm
    return tuple(jax.tree.leaves(run(*arrays, weight(x.shape[1]), eps=EPS, region="r", impl=impl)))


@functools.cache
def whole(name: str) -> list[np.ndarray]:
    return [np.asarray(y) for y in op(name, "hopper", *rows(name))]


@pytest.mark.parametrize("name, page, n", [("rope 64", 16, 37), ("rope 128", 16, 1), ("rope 128", 64, T)])
def test_keys_and_values_go_to_their_pages(name, page, n):
    """The bits of `qk_norm_rope`, where the slots say; NaN elsewhere stays, and a donated cache is written in place."""
    qkv, positions = (x[:n] for x in rows(name))
    K, _, d = qkv.shape[1:]
    count = 2 * T // page
    slots = np.random.default_rng(3).permutation(count * page)[:n].astype(np.int32)
    slots[1::5] = 2**30
    norms = weight(d, 1), weight(d, 2)
    options = dict(eps=EPS, theta=THETA, max_positions=MOST, region="r", impl="hopper")

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def call(qkv, positions, k, v, slots, layer):
        return qk_norm_rope.to_pages(qkv, positions, *norms, k, v, slots, layer, **options)

    before = [jnp.full((2, count, page, K, d), jnp.nan, jnp.bfloat16) for _ in range(2)]
    places = [x.unsafe_buffer_pointer() for x in before]
    q, *after = call(qkv, positions, *before, slots, jnp.int32(1))
    assert [x.unsafe_buffer_pointer() for x in after] == places
    kept = slots < count * page
    for got, want in zip(after, whole(name)[1:], strict=True):
        got = np.array(got)
        flat = got[1].reshape(-1, K, d)
        assert same([flat[slots[kept]]], [want[:n][kept]])
        flat[slots[kept]] = np.nan
        assert np.isnan(got.astype(np.float32)).all(), "something else was written"
    assert same([q], [whole(name)[0][:n]])


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_own_bits_in_any_batch(name):
    """At other places too, so that it lies in other tiles and warps."""
    for n in (1, 7, 37, 1000) if name in ONE_OF_EACH else (37,):
        pick = np.random.default_rng(n).permutation(T)[:n]
        some = (x[pick] for x in rows(name))
        assert same(op(name, "hopper", *some), [y[pick] for y in whole(name)]), n


@pytest.mark.parametrize("name", CASES)
def test_nan_in_the_neighbours_and_duplicates(name):
    spoilt = [x.copy() for x in rows(name)]
    for x in spoilt[: 1 + name.startswith("add")]:
        x[1::2] = np.nan
    dirty = op(name, "hopper", *spoilt)
    assert np.isnan(np.asarray(dirty[0][1], np.float32)).all()
    assert same([np.asarray(y)[::2] for y in dirty], [y[::2] for y in whole(name)])
    twins = op(name, "hopper", *(np.broadcast_to(x[7], x.shape) for x in rows(name)))
    assert same(twins, [np.broadcast_to(y[7], y.shape) for y in whole(name)])


@pytest.mark.parametrize("name", CASES)
def test_control_one_step_of_one_element_changes_its_row_and_no_other(name):
    x = rows(name)[0].copy()
    row = bits(x)[11].reshape(-1)
    row[np.abs(x[11].astype(np.float32)).argmax()] ^= 64
    after = op(name, "hopper", x, *rows(name)[1:])
    changed = np.any([(bits(a) != bits(b)).reshape(T, -1).any(axis=1) for a, b in zip(after, whole(name))], axis=0)
    assert np.flatnonzero(changed).tolist() == [11]


PLANS = {"norm 4096": (8, 3, 1), "add norm 576": (4, 3, 2), "rope 128": (4, 1), "silu 1544": (8, 4, 6)}


@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_does_not_reach_the_bits(monkeypatch, name):
    module = {"n": norm, "a": norm, "r": rope, "s": silu}[name[0]]
    picked = []
    monkeypatch.setattr(module, "schedule", lambda *_: picked.append(1) or PLANS[name])
    assert same(jax.jit(lambda *x: op.__wrapped__(name, "hopper", *x))(*rows(name)), whole(name))
    assert picked


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_with_a_gradient(name):
    """The forward has its bits, compiled as part of another program; the gradient has the same bits each time."""
    count = 1 + name.startswith("add")

    def loss(*inputs):
        out = op.__wrapped__(name, "hopper", *inputs, *rows(name)[count:])
        return sum(jnp.sum(y.astype(jnp.float32)) for y in out), out

    run = jax.jit(jax.value_and_grad(loss, tuple(range(count)), has_aux=True))
    (_, out), gradient = run(*rows(name)[:count])
    assert same(out, whole(name))
    assert same(gradient, run(*rows(name)[:count])[1])


# The documented order, in numpy: bf16 squares are exact in fp32, so that fma and product-then-sum are one.


def ordered_sum(squares_TPEc: np.ndarray) -> np.ndarray:
    """fp32 [T, pieces, warps, lanes, 8] -> [T]: pieces in order, 8 neighbours in order, lanes by doubling, warps by pairs."""
    total = np.zeros_like(squares_TPEc[:, 0])
    for piece in range(squares_TPEc.shape[1]):
        total += squares_TPEc[:, piece]
    lanes = total[..., 0]
    for i in range(1, 8):
        lanes = lanes + total[..., i]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    warps = lanes[..., 0]
    while warps.shape[-1] > 1:
        warps = warps[..., 0::2] + warps[..., 1::2]
    return warps[..., 0]


def normalised(x: np.ndarray, total: np.ndarray, w: np.ndarray) -> np.ndarray:
    f32 = np.float32
    r = f32(1) / np.sqrt(total / f32(x.shape[-1]) + f32(EPS))
    n = (x.astype(f32) * r.reshape(*r.shape, *[1] * (x.ndim - r.ndim))).astype(jnp.bfloat16)
    return (n.astype(f32) * w.astype(f32)).astype(jnp.bfloat16)


@pytest.mark.parametrize("name, D", [("add norm 576", 576), ("norm 4096", 4096)])
def test_the_norm_sums_in_the_order_that_its_entry_names(name, D):
    x = whole(name)[1] if name.startswith("add") else rows(name)[0]
    warps = norm.row_warps(D)
    assert f"{warps * 256}-wide pieces in order" in norm.entry(D, EPS, jnp.bfloat16, False)["order"]
    squares = np.pad(x.astype(np.float32) ** 2, ((0, 0), (0, -D % (warps * 256)))).reshape(T, -1, warps, 32, 8)
    want = normalised(x, ordered_sum(squares), np.asarray(weight(D)))
    assert same([whole(name)[0]], [want])
    other = normalised(x, ordered_sum(squares[..., ::-1]), np.asarray(weight(D)))
    assert not same([whole(name)[0]], [other])  # the rows tell orders apart


def test_rope_sums_in_the_order_that_its_entry_names():
    x, positions = rows("rope 128")
    T_, K, g2, d = x.shape
    k, f32 = x[:, :, -2], np.float32
    total = ordered_sum((k.astype(f32) ** 2).reshape(T_ * K, 2, 1, d // 16, 8)).reshape(T_, K)
    n = normalised(k, total, np.asarray(weight(d, 2))).astype(f32)
    table = qk_norm_rope.rope_table(MOST, d, THETA)[positions].astype(jnp.bfloat16).astype(f32)
    cos, sin = table[:, None, 0], table[:, None, 1]
    rounded = lambda y: y.astype(jnp.bfloat16).astype(f32)  # noqa: E731
    a, b = n[..., : d // 2], n[..., d // 2 :]
    want = np.concatenate([rounded(a * cos) - rounded(b * sin), rounded(b * cos) + rounded(a * sin)], axis=-1)
    assert same([whole("rope 128")[1]], [want.astype(jnp.bfloat16)])


def exact(name: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The op in float64."""
    x = arrays[0].astype(np.float64)
    if name.startswith("silu"):
        gate, up = np.split(x, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * up,)
    unit = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(w, np.float64)  # noqa: E731
    if not name.startswith("rope"):
        h = x + arrays[1].astype(np.float64) if name.startswith("add") else x
        return (unit(h, weight(x.shape[1])), h)[: len(arrays)]
    d = x.shape[-1]
    q, k = x[:, :, :-2], x[:, :, -2]
    q, k = unit(q, weight(d, 1)), unit(k, weight(d, 2))
    table = qk_norm_rope.rope_table(MOST, d, THETA)[arrays[1]].astype(np.float64)

    def turn(x):
        cos, sin = (table[:, i].reshape(len(x), *[1] * (x.ndim - 2), d // 2) for i in (0, 1))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turn(q).reshape(len(x), -1, d), turn(k), x[:, :, -1]


@pytest.mark.parametrize("name", CASES)
def test_no_less_accurate_than_the_library(name):
    part = [x[:512] for x in rows(name)]
    found = zip(whole(name), op(name, "native", *part), exact(name, *part), strict=True)
    for i, (got, library, want) in enumerate(found):
        ours, theirs = errors(f"{name}, result {i}", got[:512], library, want)
        assert ours <= theirs * (1 + 1e-4)


def test_gradient_of_silu_is_no_less_accurate_than_the_library():
    (x,), F = rows("silu 1544"), 1544
    dy = np.random.default_rng(5).standard_normal((T, F)).astype(jnp.bfloat16)

    def gradient(impl):
        return jax.jit(lambda x, dy: jax.vjp(lambda x: silu_mul.silu_mul(x, region="r", impl=impl), x)[1](dy)[0])(x, dy)

    g, u, d = (np.asarray(a, np.float64) for a in (x[:, :F], x[:, F:], dy))
    s = 1 / (1 + np.exp(-g))
    want = np.concatenate([d * u * s * (1 + g * (1 - s)), d * g * s], axis=1)
    ours, theirs = errors("silu 1544, gradient", gradient("hopper"), gradient("native"), want)
    assert ours <= theirs * (1 + 1e-3)


def test_silu_at_the_ends_of_the_range():
    """No NaN where the exact function has none, and bf16's accuracy wherever fp32 holds exp(-g)."""
    x = np.ones((T, 2 * 1544), np.float32)
    x[:, 0] = np.linspace(-88, 120, T)
    x[:6, 0] = 0.0, -0.0, 3e38, -3e38, 1e-38, np.inf
    x = x.astype(jnp.bfloat16)
    got = np.asarray(op("silu 1544", "hopper", x)[0], np.float64)[:, 0]
    g = x[:, 0].astype(np.float64)
    with np.errstate(over="ignore"):
        want = g / (1 + np.exp(-g))
    normal = np.isfinite(want) & (np.abs(want) > 1e-37)
    assert not np.isnan(got).any() and got[5] == np.inf
    assert np.abs(got[normal] / want[normal] - 1).max() < 2**-8
    assert np.abs(got[np.abs(want) <= 1e-37]).max() <= 2e-37
