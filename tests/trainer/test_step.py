"""The train step: what the gate sees, gradients that microbatching does not change, AdamW, donation, determinism."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from isomodel.numerics import Numerics
from isomodel.specs import cast_params
from tests.trainer import tiny
from trainer.config import OptimizerSection
from trainer.loss import combine, token_weights
from trainer.optimizer import make_optimizer, schedule
from trainer.packing import Bucket, pack
from trainer.step import NonFiniteGradient, TrainState, _compiled

HALF = Bucket(rows=64, sequences=8, pages=4, page_size=16)


def minibatch(count: int = 10, bucket: Bucket = tiny.BUCKET, advantages=None, given=None):
    given = tiny.trajectories(count, seed=7) if given is None else given
    weights = token_weights([t.loss_tokens for t in given], "token")
    advantages = np.random.default_rng(0).normal(size=len(given)) if advantages is None else advantages
    return pack(given, advantages, weights, [bucket])


def gradient(step, state: TrainState, packed):
    gradients, logprobs, stats = step.zero_gradients(state), [], []
    for p in packed:
        gradients, logprobs_T, s = step.accumulate(state, gradients, p)
        logprobs.append(np.asarray(logprobs_T))
        stats.append(s)
    return gradients, logprobs, stats


def bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def relative(a, b) -> float:
    """|a - b| / |b| over all weights."""
    return float(optax.tree.norm(jax.tree.map(lambda x, y: x - y, a, b)) / optax.tree.norm(b))


REMAT = [False, True, "save_attention"]


@pytest.mark.parametrize("remat", REMAT)
def test_the_forward_under_grad_has_the_bits_of_scoring(remat):
    step = tiny.step(remat=remat)
    state = tiny.state(step)
    packed = minibatch()
    _, logprobs, _ = gradient(step, state, packed)
    scored = tiny.step().score  # without gradient, compiled by another object
    for p, got in zip(packed, logprobs, strict=True):
        want = np.asarray(scored(state.params, p))
        rows = int(p.micro.batch.q_start_S1[-1])
        assert got[:rows].view(np.uint32).tolist() == want[:rows].view(np.uint32).tolist()
        assert (got[:rows] <= 0).all() and np.isfinite(got).all()
    # Control: other weights give other bits.
    other = np.asarray(scored(tiny.state(step, seed=1).params, packed[0]))
    assert (other.view(np.uint32) != logprobs[0].view(np.uint32)).mean() > 0.5


def test_what_is_recomputed_reaches_memory_and_no_bit_of_the_gradient():
    steps = [tiny.step(remat=remat) for remat in REMAT]
    packed = minibatch()
    grads = [gradient(step, tiny.state(step), packed)[0] for step in steps]
    assert bits(grads[0]) == bits(grads[1]) == bits(grads[2])
    programs = [_compiled(step._train(tiny.BUCKET)) for step in steps]
    none, layers, but_attention = (p.memory_analysis().temp_size_in_bytes for p in programs)
    outputs = tiny.CONFIG.num_layers * tiny.BUCKET.rows * tiny.CONFIG.num_heads * tiny.CONFIG.head_dim * 2
    assert layers + outputs <= but_attention < none


def test_accumulation_and_packing_change_the_gradient_by_rounding_only():
    """Field faults of averaging each microbatch by itself: here every share is of the minibatch."""
    step = tiny.step(Numerics(compute_dtype="float32"))
    state = tiny.state(step)
    whole = minibatch(6)
    parts = minibatch(6, HALF)
    assert (len(whole), len(parts)) == (1, 2)
    a, _, stats_a = gradient(step, state, whole)
    b, _, stats_b = gradient(step, state, parts)
    assert all(g.dtype == np.float32 for g in a.values())
    assert relative(b, a) < 1e-5
    assert combine(stats_a)["loss"] == pytest.approx(combine(stats_b)["loss"], rel=1e-4)
    # Control: weights that are each microbatch's own average.
    advantages = np.random.default_rng(0).normal(size=6)
    given = tiny.trajectories(6, seed=7)
    local = [minibatch(given=[given[i] for i in p.members], advantages=advantages[list(p.members)])[0] for p in parts]
    wrong, _, _ = gradient(step, state, local)
    wrong = jax.tree.map(lambda g: g / len(parts), wrong)
    assert relative(wrong, a) > 1e-2


def test_in_bfloat16_too_the_order_of_microbatches_is_rounding():
    step = tiny.step()
    state = tiny.state(step)
    parts = minibatch(10)
    assert len(parts) >= 2
    a, _, _ = gradient(step, state, parts)
    b, _, _ = gradient(step, state, parts[::-1])
    assert relative(b, a) < 1e-5


def test_the_same_step_twice_has_the_same_bits():
    step = tiny.step()
    results = []
    for _ in range(2):
        state = tiny.state(step)
        for k in range(2):
            gradients, logprobs, _ = gradient(step, state, minibatch())
            state, info = step.apply(state, gradients, k)
        results.append((bits(state), bits(logprobs), info))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_engines_copy_outlives_the_update_and_the_new_one_is_one_rounding(dtype):
    step = tiny.step(Numerics(compute_dtype=dtype))
    state = tiny.state(step)
    for k in range(2):  # twice: the second takes memory that the first gave out
        old_params, before = state.params, bits(state.params)
        gradients, _, _ = gradient(step, state, minibatch(4))
        state, _ = step.apply(state, gradients, k)
        assert bits(old_params) == before  # not donated: still readable
        assert bits(state.params) == bits(cast_params(state.masters, step.numerics.dtype)) != before
        assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.masters))
        assert all(x.dtype in (np.float32, np.int32) for x in jax.tree.leaves(state.optimizer))
    # A restored state goes on with the same bits.
    again = step.restore(state.masters, state.optimizer)
    assert bits(again) == bits(state)


def test_learning_rate_zero_changes_no_bit():
    step = tiny.step(optimizer=(("lr", 0.0), ("weight_decay", 0.1)))
    state = tiny.state(step)
    before = bits((state.masters, state.params))
    gradients, _, _ = gradient(step, state, minibatch(4))
    assert float(optax.tree.norm(gradients)) > 0
    state, info = step.apply(state, gradients, 0)
    assert bits((state.masters, state.params)) == before
    assert info["lr"] == 0 and info["grad_norm"] > 0


def test_a_step_towards_an_advantage_makes_its_tokens_likelier():
    step = tiny.step(optimizer=(("lr", 3e-3),))
    state = tiny.state(step)
    given = tiny.rescored(step, state, tiny.trajectories(4, seed=2))
    packed = minibatch(given=given, advantages=[1.0, -1.0, 0.0, 0.0])
    gradients, logprobs, stats = gradient(step, state, packed)
    report = combine(stats)
    assert report["ratio/max"] == report["ratio/min"] == 1.0  # the rollout's bits: on-policy
    state, _ = step.apply(state, gradients, 0)
    ((p, before),) = zip(packed, logprobs, strict=True)
    after = np.asarray(step.score(state.params, p))
    mean = lambda x, i: float(np.mean(dict(p.unpack(np.where(p.micro.loss_mask_T, x, 0)))[i]))  # noqa: E731
    assert mean(after, 0) > mean(before, 0) and mean(after, 1) < mean(before, 1)


def test_a_gradient_that_is_not_finite_updates_nothing():
    step = tiny.step()
    state = tiny.state(step)
    before = bits(state)
    gradients = step.zero_gradients(state)
    gradients["layers.mlp.down"] = gradients["layers.mlp.down"].at[0, 0, 0].set(np.nan)
    with pytest.raises(NonFiniteGradient, match="norm is nan; weights with a NaN or an infinity: layers.mlp.down"):
        step.apply(state, gradients, 0)
    assert bits(state) == before


def test_update_is_clipped_adamw_by_hand():
    section = OptimizerSection(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=0.5, total_steps=10)
    optimizer = make_optimizer(section, tiny.CONFIG)
    masters = tiny.state(tiny.step()).masters
    rng = np.random.default_rng(0)
    grads = {n: rng.normal(size=w.shape).astype(np.float32) for n, w in masters.items()}
    changes, _ = jax.jit(optimizer.update)(grads, optimizer.init(masters), masters)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for name, w in masters.items():
        g = grads[name].astype(np.float64) * min(1, 0.5 / norm)
        decayed = 0.0 if "norm" in name else 0.1
        want = -0.01 * (g / (np.abs(g) + 1e-8) + decayed * np.asarray(w, np.float64))  # first step: m / sqrt(v) is the sign
        np.testing.assert_allclose(np.asarray(changes[name]), want, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (dict(), [1.0] * 12),
        (dict(warmup_steps=4), [0.25, 0.5, 0.75, *[1.0] * 9]),
        (dict(schedule="linear", min_lr=0.2), [0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2, 0.2, 0.2]),
        (dict(schedule="linear", warmup_steps=5), [0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0, 0, 0]),
        (dict(schedule="cosine", min_lr=0.5), [0.5 + 0.25 * (1 + np.cos(np.pi * min(k, 10) / 10)) for k in range(1, 13)]),
        (dict(lr=0.0), [0.0] * 12),
        (dict(lr=0.0, schedule="cosine"), [0.0] * 12),
    ],
)
def test_schedule(settings, want):
    section = OptimizerSection(**(dict(lr=1.0, total_steps=10) | settings))
    rate = schedule(section)
    assert [float(rate(k)) for k in range(12)] == pytest.approx(want, abs=1e-6)


def test_everything_is_compiled_ahead():
    step = tiny.step(remat=True)
    before = _compiled.cache_info().currsize
    names = []
    assert step.compile([tiny.BUCKET, HALF], score=True, progress=names.append) == 5
    assert names == ["train 128 x 8", "train 64 x 8", "score 128 x 8", "score 64 x 8", "optimizer"]
    compiled = _compiled.cache_info().currsize
    assert compiled <= before + 4
    state = tiny.state(step)
    for bucket in (tiny.BUCKET, HALF):
        for packed in minibatch(4, bucket):
            step.accumulate(state, step.zero_gradients(state), packed)
            step.score(state.params, packed)
    assert _compiled.cache_info().currsize == compiled  # nothing was compiled by running
