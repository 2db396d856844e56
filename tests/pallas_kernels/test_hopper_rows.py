"""The Hopper row kernels without a GPU: in the interpreter, with its race detector, against the reference; every schedule lowered."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic, qk_norm_rope, registry, rms_norm, silu_mul
from pallas_kernels.qk_norm_rope import hopper as rope
from pallas_kernels.qk_norm_rope import reference as rope_reference
from pallas_kernels.rms_norm import hopper as norm
from pallas_kernels.rms_norm import reference as rms_norm_reference
from pallas_kernels.silu_mul import hopper as silu
from pallas_kernels.silu_mul import reference as silu_reference
from pallas_kernels.weight import Weight
from tests.pallas_kernels import pages_work
from tests.pallas_kernels.base import bits, relative, same, spread

EPS = 1e-6


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Programs have several tiles each, and the ring goes round."""
    monkeypatch.setattr(mosaic, "SMS", 1)


def weight(D, seed=9):
    return jnp.asarray(1 + 0.3 * np.random.default_rng(seed).standard_normal(D), jnp.bfloat16)


def run(call, *arrays):
    """What `call(impl, *arrays)` gives with the Hopper kernel in the interpreter."""
    with mosaic.interpreted():
        out = jax.tree.map(np.asarray, call("hopper", *arrays))
    assert not gpu_callbacks.get_races().races_found
    return out


def normed(D, has_residual, impl, *rows):
    op = rms_norm.add_rms_norm if has_residual else rms_norm.rms_norm
    return jax.tree.leaves(op(*rows, weight(D), eps=EPS, region="r", impl=impl))


def turned(d, has_norm, impl, qkv, positions):
    weights = (weight(d, 1), weight(d, 2)) if has_norm else (None, None)
    return qk_norm_rope.qk_norm_rope(
        qkv, positions, *weights, eps=EPS, theta=1e4, max_positions=64, region="r", impl=impl
    )


def gated(impl, x):
    return (silu_mul.silu_mul(x, region="r", impl=impl),)


def case(name, T, seed=0):
    """(call, its arrays of T rows)."""
    rng = np.random.default_rng(seed)
    op, *options = name.split()
    if op == "norm":
        D, has_residual = int(options[0]), len(options) > 1
        return functools.partial(normed, D, has_residual), [spread(rng, T, D) for _ in range(1 + has_residual)]
    if op == "rope":
        K, G, d, has_norm = (int(o) for o in options)
        rows = [spread(rng, T, K, G + 2, d, binades=2), jnp.asarray(rng.integers(0, 64, T), jnp.int32)]
        return functools.partial(turned, d, bool(has_norm)), rows
    return gated, [spread(rng, T, 2 * int(options[0]), binades=3)]


CASES = {
    "norm 96": 21,  # narrower than a piece
    "norm 576 residual": 21,  # pieces of 256, the last one not full
    "norm 3072 residual": 9,  # four warps a row
    "rope 2 3 64 1": 67,
    "rope 3 1 64 0": 67,
    "rope 1 2 256 1": 19,
    "silu 264": 21,  # the last tile of gates reaches into the ups
}
"""Rows of each case: a ragged last tile, and more tiles than slots."""


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference_alone_and_among_nan(name):
    call, rows = case(name, CASES[name])
    whole = run(call, *rows)
    for got, want in zip(whole, call("reference", *rows), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        steps = np.abs(bits(got).astype(np.int64) - bits(want).astype(np.int64))
        assert steps.max() <= 1 and (steps > 0).mean() < 2e-3  # bf16 roundings that the order of a sum tips over
    pick = np.array([CASES[name] - 1, 2, 5])
    assert same(run(call, *(x[pick] for x in rows)), [y[pick] for y in whole])
    odd = np.arange(CASES[name]) % 2 == 1
    poisoned = [
        jnp.where(odd.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x).astype(x.dtype) if x.dtype == jnp.bfloat16 else x
        for x in rows
    ]
    dirty = run(call, *poisoned)
    assert np.isnan(dirty[0][1].astype(np.float32)).any()
    assert same([y[::2] for y in dirty], [y[::2] for y in whole])


@pytest.mark.parametrize(
    "K, G, d, has_norm, T", [(2, 3, 64, True, 37), (3, 1, 64, False, 40), (1, 2, 256, True, 19), (2, 2, 128, True, 1)]
)
def test_keys_and_values_go_to_their_pages(K, G, d, has_norm, T):
    rng = np.random.default_rng(1)
    qkv, positions = spread(rng, T, K, G + 2, d, binades=2), jnp.asarray(rng.integers(0, 64, T), jnp.int32)
    slots_T, before = pages_work.slots(T), pages_work.pages(K, d)
    weights = (weight(d, 1), weight(d, 2)) if has_norm else (None, None)
    options = dict(eps=EPS, theta=1e4, max_positions=64, region="r")

    def paged(impl, *rows):
        return qk_norm_rope.to_pages(*rows[:2], *weights, *rows[2:4], slots_T, jnp.int32(1), impl=impl, **options)

    q, k, v = run(functools.partial(turned, d, has_norm), qkv, positions)
    got = run(paged, qkv, positions, *before)
    assert same(got, [q, *(pages_work.placed(x, y, slots_T, 1) for x, y in zip(before, (k, v), strict=True))])
    assert not same(got[1:], before), "control: something was written"
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (qkv, positions, *before)]
    text = jax.jit(functools.partial(paged, "hopper")).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and text.count("output_operand_alias<") == 2 and "scatter" not in text


def in_a_stack(w):
    """The weight as the layer 1 of a stack, beside NaN."""
    return Weight(jnp.stack([jnp.full_like(w, jnp.nan), w]), jnp.int32(1))


@pytest.mark.parametrize("name", ["norm 576 residual", "norm 3072", "rope 2 3 64 1"])
def test_a_layer_of_a_stack_is_read_in_place(monkeypatch, name):
    call, rows = case(name, 9)
    alone = run(call, *rows)
    monkeypatch.setitem(globals(), "weight", lambda *a, plain=weight: in_a_stack(plain(*a)))
    assert same(run(call, *rows), alone)
    call, _ = case(name, 9)
    text = jax.jit(functools.partial(call, "hopper")).trace(*rows).lower(lowering_platforms=("cuda",)).as_text()
    assert "dynamic_slice" not in text
    with pytest.raises(NotImplementedError, match="stack of weights"):
        jax.grad(lambda x: call("reference", x, *rows[1:])[0].astype(float).sum())(rows[0])


@pytest.mark.parametrize(
    "op, plans", [("norm", [(4, 2, 1), (8, 3, 2)]), ("silu", [(4, 2, 1), (8, 3, 2)]), ("rope", [(2, 1), (3, 2)])]
)
def test_a_schedule_does_not_reach_the_bits(monkeypatch, op, plans):
    name = {"norm": "norm 576 residual", "silu": "silu 264", "rope": "rope 2 3 64 1"}[op]
    module = {"norm": norm, "silu": silu, "rope": rope}[op]
    call, rows = case(name, 50)
    out = []
    for plan in plans:
        monkeypatch.setattr(module, "schedule", lambda *_, plan=plan: plan)
        out.append(run(call, *rows))
    assert same(*out)


BACKWARD = {
    "norm 576": (9, 576),
    "norm 3072": (5, 3072),
    "rope with norms": (19, 2, 4, 128, True),
    "rope without norms": (67, 1, 3, 64, False),
    "rope of many groups": (9, 1, 18, 256, True),  # a slot of whole lanes would not fit
    "silu": (21, 264),  # the last tile of gates reaches past their end
    "silu of many tiles": (50, 1544),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_against_the_reference(name):
    rng = np.random.default_rng(0)
    make = lambda *shape: spread(rng, *shape, binades=2)  # noqa: E731
    T, *shape = BACKWARD[name]
    if name.startswith("norm"):
        args = (make(T, *shape), weight(*shape), make(T, *shape), make(T, *shape), EPS)
        modules = norm, rms_norm_reference
    elif name.startswith("silu"):
        args = (make(T, 2 * shape[0]), make(T, *shape))
        modules = silu, silu_reference
    else:
        K, g2, d, has_norms = shape
        norms = (weight(d, 1), weight(d, 2)) if has_norms else ()
        grads = (make(T, K * (g2 - 2), d), make(T, K, d), make(T, K, d))
        args = (make(T, K, g2, d), make(T, 2, d // 2), norms, grads, EPS)
        modules = rope, rope_reference
    with mosaic.interpreted():
        got = jax.tree.leaves(modules[0].backward(*args))
    assert not gpu_callbacks.get_races().races_found
    for a, b in zip(got, jax.tree.leaves(modules[1].backward(*args)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative(a, b) < (1e-5 if a.dtype == jnp.float32 else 1e-3)


def test_control_the_race_detector_sees_a_slot_taken_too_early(monkeypatch):
    """Without the wait for a slot's copy out, the next tile is copied over it."""
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: None if wait_read_only else wait(n))
    monkeypatch.setattr(silu, "schedule", lambda *_: (4, 2, 1))
    call, rows = case("silu 256", 32)
    with pytest.raises(AssertionError):
        run(call, *rows)


SHAPES = {
    "norm": [(T, D, r) for T in (1, 256, 16384) for D in (64, 576, 1024, 2560, 4096, 5120, 8192) for r in (False, True)],
    "silu": [(T, F) for T in (1, 256, 16384) for F in (8, 1536, 3072, 9728, 12288)],
    "rope": [(T, *s) for T in (1, 16384) for s in ((1, 18, 128), (3, 5, 64), (8, 4, 128), (8, 6, 128), (16, 3, 256), (2, 18, 256))],
}  # fmt: skip
"""Every entry that the schedules pick for these is lowered."""


def lower(f, *args):
    assert "mosaic_gpu" in jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("op", SHAPES)
def test_schedules_lower_for_cuda(monkeypatch, op):
    monkeypatch.setattr(mosaic, "SMS", 132)
    row = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    seen = set()
    for T, *s in SHAPES[op]:
        if op == "norm":
            D, has_residual = s
            key, f = (D, has_residual), functools.partial(norm.rms_norm, eps=EPS)
            plan = norm.schedule(T, D, has_residual)
            args = row(T, D), row(T, D) if has_residual else None, Weight(row(D))
        elif op == "silu":
            key, f, plan, args = (), silu.silu_mul, silu.schedule(T, *s), (row(T, 2 * s[0]),)
        else:
            K, g2, d = s
            key, f, plan = (g2, d), functools.partial(rope.qk_norm_rope, eps=EPS), rope.schedule(tuple(s))
            args = (row(T, K, g2, d), row(T, 2, d // 2), (Weight(row(d)), Weight(row(d))))
        if (key, plan) in seen:
            continue
        seen.add((key, plan))
        lower(f, *args)
    assert len(seen) > 1


def test_gradients_lower_for_cuda(monkeypatch):
    monkeypatch.setattr(mosaic, "SMS", 132)
    row = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    for D in (576, 4096, 8192):
        lower(functools.partial(norm.backward, eps=EPS), row(300, D), row(D), row(300, D), row(300, D))
    for T, F in ((300, 1536), (16384, 12288)):
        lower(silu.backward, row(T, 2 * F), row(T, F))
    for K, g2, d in ((3, 5, 64), (8, 6, 128), (2, 18, 256)):
        grads = (row(300, K * (g2 - 2), d), row(300, K, d), row(300, K, d))
        lower(
            functools.partial(rope.backward, eps=EPS), row(300, K, g2, d), row(300, 2, d // 2), (row(d), row(d)), grads
        )


def test_what_the_kernels_cannot_take_is_refused():
    wide = lambda *shape: jnp.ones(shape, jnp.float32)  # noqa: E731
    with pytest.raises(registry.Unsupported, match="rms_norm: the Hopper kernel takes bfloat16, not float32"):
        rms_norm.rms_norm(wide(2, 64), wide(64), eps=EPS, region="r", impl="hopper")
    with pytest.raises(registry.Unsupported, match="silu_mul: the Hopper kernel takes bfloat16"):
        silu_mul.silu_mul(wide(2, 64), region="r", impl="hopper")
    with pytest.raises(registry.Unsupported, match="multiples of 64, not 100"):
        normed(100, False, "hopper", jnp.ones((2, 100), jnp.bfloat16))
    with pytest.raises(registry.Unsupported, match="multiples of 8, not 12"):
        gated("hopper", jnp.ones((2, 24), jnp.bfloat16))
    with pytest.raises(registry.Unsupported, match="head_dim 32, 64, 128 or 256, not 96"):
        turned(96, True, "hopper", jnp.ones((2, 1, 3, 96), jnp.bfloat16), jnp.zeros(2, jnp.int32))
