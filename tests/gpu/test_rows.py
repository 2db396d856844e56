"""The Hopper row kernels' bits on the GPU: norms, rope and silu * up give a row its own bits in any batch, schedule and launch."""

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

from pallas_kernels import qk_norm_rope, rms_norm, silu_mul
from pallas_kernels.qk_norm_rope import hopper as rope
from pallas_kernels.rms_norm import hopper as norm
from pallas_kernels.silu_mul import hopper as silu

EPS, THETA, MOST = 1e-6, 1e6, 4096
T = 4096
CASES = {
    "norm 4096": ((4096,),),
    "add norm 576": ((576,), (576,)),
    "add norm 4096": ((4096,), (4096,)),
    "add norm 8192": ((8192,), (8192,)),
    "rope 64": ((3, 5, 64), "positions"),
    "rope 128": ((8, 6, 128), "positions"),
    "rope 256": ((2, 10, 256), "positions"),
    "rope without norm 128": ((1, 18, 128), "positions"),
    "silu 1544": ((2 * 1544,),),
}
"""Shape of a row of each operand."""


@functools.cache
def rows(name: str) -> tuple[jax.Array, ...]:
    """T rows of each operand over 8 binades, so that another order of summation gives another sum."""

    def operand(key, shape):
        value, scale = jax.random.split(key)
        if shape == "positions":
            return jax.random.randint(value, (T,), 0, MOST, jnp.int32)
        scales = jnp.exp2(jax.random.randint(scale, (T, *shape), -4, 4))
        return (jax.random.normal(value, (T, *shape)) * scales).astype(jnp.bfloat16)

    keys = jax.random.split(jax.random.key(len(name)), len(CASES[name]))
    return tuple(operand(*pair) for pair in zip(keys, CASES[name], strict=True))


def weight(D: int, seed: int = 9) -> jax.Array:
    return jnp.asarray(1 + 0.3 * np.random.default_rng(seed).standard_normal(D), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 1))
def op(name: str, impl: str, *arrays) -> tuple[jax.Array, ...]:
    x = arrays[0]
    if name.startswith("rope"):
        norms = (None, None) if "without" in name else (weight(x.shape[-1], 1), weight(x.shape[-1], 2))
        return qk_norm_rope.qk_norm_rope(
            *arrays, *norms, eps=EPS, theta=THETA, max_positions=MOST, region="r", impl=impl
        )
    if name.startswith("silu"):
        return (silu_mul.silu_mul(x, region="r", impl=impl),)
    run = rms_norm.add_rms_norm if name.startswith("add") else rms_norm.rms_norm
    return tuple(jax.tree.leaves(run(*arrays, weight(x.shape[1]), eps=EPS, region="r", impl=impl)))


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint16)


@functools.cache
def whole(name: str) -> list[np.ndarray]:
    return [np.asarray(y) for y in op(name, "hopper", *rows(name))]


def differ(got, want) -> int:
    return sum(int((bits(g) != bits(w)).sum()) for g, w in zip(got, want, strict=True))


EVERY = (1, 2, 3, 5, 9, 33, 255, 1000, 2049)
FEW = (1, 37)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_own_bits_in_any_batch(name):
    """At other places too, so that it lies in other tiles and warps."""
    for n in EVERY if name in ("add norm 576", "rope 128", "silu 1544") else FEW:
        pick = np.random.default_rng(n).permutation(T)[:n]
        some = (np.asarray(x)[pick] for x in rows(name))
        assert differ(op(name, "hopper", *some), [y[pick] for y in whole(name)]) == 0, n


@pytest.mark.parametrize("name", CASES)
def test_nan_in_the_neighbours_and_duplicates(name):
    odd = np.arange(T) % 2 == 1
    spoilt = [
        x if x.dtype != jnp.bfloat16 else jnp.where(odd.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
        for x in rows(name)
    ]
    dirty = op(name, "hopper", *spoilt)
    assert bool(jnp.isnan(dirty[0][1]).all())
    assert differ([y[::2] for y in dirty], [y[::2] for y in whole(name)]) == 0
    twins = op(name, "hopper", *(jnp.broadcast_to(x[7], x.shape) for x in rows(name)))
    assert differ(twins, [np.broadcast_to(y[7], y.shape) for y in whole(name)]) == 0


@pytest.mark.parametrize("name", CASES)
def test_control_one_step_of_one_element_changes_its_row_and_no_other(name):
    x = np.array(rows(name)[0])
    row = bits(x)[11].reshape(-1)
    row[np.abs(x[11].astype(np.float32)).argmax() if x.ndim == 2 else 0] ^= 64
    after = op(name, "hopper", jnp.asarray(x), *rows(name)[1:])
    changed = np.any([(bits(a) != bits(b)).reshape(T, -1).any(axis=1) for a, b in zip(after, whole(name))], axis=0)
    assert np.flatnonzero(changed).tolist() == [11]


PLANS = {
    "norm 4096": [(2, 4, 3), (8, 3, 1)],
    "add norm 576": [(4, 3, 2), (32, 2, 1)],
    "rope 128": [(3, 2), (4, 1)],
    "silu 1544": [(4, 2, 1), (8, 4, 6)],
}


@pytest.mark.parametrize("name, plan", [(name, plan) for name, plans in PLANS.items() for plan in plans])
def test_a_schedule_does_not_reach_the_bits(monkeypatch, name, plan):
    module = {"n": norm, "a": norm, "r": rope, "s": silu}[name[0]]
    picked = []
    monkeypatch.setattr(module, "schedule", lambda *_: picked.append(plan) or plan)
    assert differ(jax.jit(lambda *x: op.__wrapped__(name, "hopper", *x))(*rows(name)), whole(name)) == 0
    assert picked == [plan]


@pytest.mark.parametrize("name", ["add norm 576", "rope 64", "silu 1544"])
def test_with_a_gradient_and_compiled_anew(name):
    floats = [i for i, x in enumerate(rows(name)) if x.dtype == jnp.bfloat16]

    def loss(*inputs):
        full = list(rows(name))
        for i, x in zip(floats, inputs, strict=True):
            full[i] = x
        out = op.__wrapped__(name, "hopper", *full)
        return sum(jnp.sum(y.astype(jnp.float32)) for y in out), out

    run = lambda: jax.jit(jax.value_and_grad(loss, tuple(range(len(floats))), has_aux=True))(  # noqa: E731
        *(rows(name)[i] for i in floats)
    )
    (_, out), gradient = run()
    assert differ(out, whole(name)) == 0
    jax.clear_caches()
    (_, out), again = run()
    assert differ(out, whole(name)) == 0
    assert differ(gradient, again) == 0


def digest() -> str:
    """Of the bits of a case of each op."""
    names = "add norm 576", "rope 128", "silu 1544"
    return hashlib.sha256(b"".join(bits(y).tobytes() for name in names for y in whole(name))).hexdigest()


def test_two_processes():
    here = pathlib.Path(__file__)
    code = f"import runpy; print(runpy.run_path({str(here)!r})['digest']())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here.parents[2], env=dict(os.environ)
    )
    assert done.stdout.strip() == digest(), done.stderr


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
    x = whole(name)[1] if name.startswith("add") else np.asarray(rows(name)[0])
    warps = norm.row_warps(D)
    assert f"{warps * 256}-wide pieces in order" in norm.entry(D, EPS, jnp.bfloat16, False)["order"]
    squares = np.pad(x.astype(np.float32) ** 2, ((0, 0), (0, -D % (warps * 256)))).reshape(T, -1, warps, 32, 8)
    want = normalised(x, ordered_sum(squares), np.asarray(weight(D)))
    assert differ([whole(name)[0]], [want]) == 0
    other = normalised(x, ordered_sum(squares[..., ::-1]), np.asarray(weight(D)))
    assert differ([whole(name)[0]], [other]) > 0  # the rows tell orders apart


def test_rope_sums_in_the_order_that_its_entry_names():
    x, positions = (np.asarray(a) for a in rows("rope 128"))
    T_, K, g2, d = x.shape
    k, f32 = x[:, :, -2], np.float32
    total = ordered_sum((k.astype(f32) ** 2).reshape(T_ * K, 2, 1, d // 16, 8)).reshape(T_, K)
    n = normalised(k, total, np.asarray(weight(d, 2))).astype(f32)
    table = qk_norm_rope.rope_table(MOST, d, THETA)[positions].astype(jnp.bfloat16).astype(f32)
    cos, sin = table[:, None, 0], table[:, None, 1]
    rounded = lambda y: y.astype(jnp.bfloat16).astype(f32)  # noqa: E731
    a, b = n[..., : d // 2], n[..., d // 2 :]
    want = np.concatenate([rounded(a * cos) - rounded(b * sin), rounded(b * cos) + rounded(a * sin)], axis=-1)
    assert differ([whole("rope 128")[1]], [want.astype(jnp.bfloat16)]) == 0


def exact(name: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The op in float64."""
    x = arrays[0].astype(np.float64)
    if name.startswith("silu"):
        gate, up = np.split(x, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * up,)
    unit = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(w, np.float64)  # noqa: E731
    if not name.startswith("rope"):
        h = x + arrays[1].astype(np.float64) if name.startswith("add") else x
        return unit(h, weight(x.shape[1])), h
    d = x.shape[-1]
    q, k = x[:, :, :-2], x[:, :, -2]
    if "without" not in name:
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
    wide = [np.asarray(x) for x in part]
    library = op(name, "native", *part)
    for got, theirs, want in zip(op(name, "hopper", *part), library, exact(name, *wide)):
        ours, theirs = (np.linalg.norm(np.asarray(y, np.float64) - want) for y in (got, theirs))
        assert ours <= theirs * (1 + 1e-4)


def test_silu_at_the_ends_of_the_range():
    """No NaN where the exact function has none, and bf16's accuracy wherever fp32 holds exp(-g)."""
    g = np.concatenate(
        [np.float32([0.0, -0.0, 3e38, -3e38, 1e-38, np.inf]), np.linspace(-88, 120, 4096, dtype=np.float32)]
    )
    g = g.astype(jnp.bfloat16)
    x = np.stack([g, np.ones_like(g)], axis=1).reshape(-1, 2)
    x = np.repeat(x, 8, axis=1)
    got = np.asarray(op("silu", "hopper", jnp.asarray(x))[0], np.float64)[:, 0]
    with np.errstate(over="ignore"):
        want = g.astype(np.float64) / (1 + np.exp(-g.astype(np.float64)))
    finite = np.isfinite(want) & (np.abs(want) > 1e-37)
    assert not np.isnan(got).any()
    assert np.abs(got[finite] / want[finite] - 1).max() < 2**-8
    assert np.abs(got[np.abs(want) <= 1e-37]).max() <= 2e-37 and got[5] == np.inf
