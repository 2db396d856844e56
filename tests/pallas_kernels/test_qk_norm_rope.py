from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import qk_norm_rope
from tests.pallas_kernels import pages_work
from tests.pallas_kernels.base import RowOp, same, spread

K, G, D = 2, 3, 32
EPS, THETA, MOST = 1e-6, 1e4, 4096


def norms(dtype):
    rng = np.random.default_rng(9)
    return tuple(jnp.asarray(1 + 0.3 * rng.standard_normal(D), dtype) for _ in range(2))


class TestQkNormRope(RowOp):
    has_norm = True

    def rows(self, rng, T, dtype):
        return spread(rng, T, K, G + 2, D, binades=2, dtype=dtype), jnp.asarray(rng.integers(0, MOST, T), jnp.int32)

    def call(self, impl, qkv, positions):
        weights = norms(qkv.dtype) if self.has_norm else (None, None)
        return qk_norm_rope.qk_norm_rope(
            qkv, positions, *weights, eps=EPS, theta=THETA, max_positions=MOST, region="r", impl=impl
        )

    def exact(self, qkv, positions):
        angle = positions[:, None] / THETA ** (np.arange(0, D, 2) / D)
        cos, sin = (f(angle)[:, None, None] for f in (np.cos, np.sin))

        def turn(x, weight):
            if self.has_norm:
                x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)
            a, b = np.split(x, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        weights = norms(jnp.float32)
        q, k = turn(qkv[:, :, :G], weights[0]), turn(qkv[:, :, G : G + 1], weights[1])
        return q.reshape(len(qkv), K * G, D), k[:, :, 0], qkv[:, :, -1]

    # Angles are rounded to fp32 where Hugging Face rounds them: 4096 radians are known to 2e-4.
    tolerance = {"bfloat16": 1e-2, "float32": 3e-4}


class TestRopeAlone(TestQkNormRope):
    has_norm = False


def test_table_is_hashed_by_its_bytes():
    one = qk_norm_rope.rope_table_hash(64, 32, 1e4)
    qk_norm_rope.rope_table_hash.cache_clear()
    assert one == qk_norm_rope.rope_table_hash(64, 32, 1e4)
    others = {qk_norm_rope.rope_table_hash(*args) for args in ((64, 32, 10001.0), (65, 32, 1e4), (64, 16, 1e4))}
    assert len(others | {one}) == 4


def test_one_norm_without_the_other_is_refused():
    with pytest.raises(ValueError, match="both norm weights or neither"):
        qk_norm_rope.qk_norm_rope(
            jnp.ones((2, 1, 3, 8)), jnp.zeros(2, jnp.int32), jnp.ones(8), None,
            eps=EPS, theta=THETA, max_positions=8, region="r", impl="reference",
        )  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "native"])
def test_keys_and_values_go_to_their_pages(impl):
    K, G, d, T = 2, 3, 64, 37
    rng = np.random.default_rng(1)
    qkv = jnp.asarray(rng.standard_normal((T, K, G + 2, d)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal(d), jnp.bfloat16) for _ in range(2)]
    rows = qkv, jnp.arange(T, dtype=jnp.int32), *weights
    options = dict(eps=1e-6, theta=1e4, max_positions=64, region="r", impl=impl)
    slots_T, before = pages_work.slots(T), pages_work.pages(K, d)
    q, k, v = jax.jit(lambda *a: qk_norm_rope.qk_norm_rope(*a, **options))(*rows)
    got = jax.jit(lambda *a: qk_norm_rope.to_pages(*a, **options))(*rows, *before, slots_T, jnp.int32(2))
    assert same(got, [q, *(pages_work.placed(x, y, slots_T, 2) for x, y in zip(before, (k, v), strict=True))])
