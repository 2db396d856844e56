from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm
from pallas_kernels.gemm import reference
from pallas_kernels.weight import Weight
from tests.pallas_kernels.base import ISO, RowOp, bits, relative, same, spread

K, N = 576, 136


def weight(dtype, n=N, k=K):
    return spread(np.random.default_rng(99), n, k, binades=3, dtype=dtype)


class TestChain(RowOp):
    def rows(self, rng, T, dtype):
        return (spread(rng, T, K, dtype=dtype),)

    def call(self, impl, x):
        return (gemm.chain(x, weight(x.dtype), region="r", impl=impl, out_dtype=jnp.float32),)

    def exact(self, x):
        dtype = jnp.float32 if np.array_equal(x, x.astype(np.float32)) and not _is_bf16(x) else jnp.bfloat16
        return (x @ np.asarray(weight(dtype), np.float64).T,)


class TestTree(RowOp):
    def rows(self, rng, T, dtype):
        return (spread(rng, T, 1024, dtype=dtype),)

    def call(self, impl, x):
        return (gemm.tree(x, weight(x.dtype, 72, 1024), region="r", impl=impl),)

    def exact(self, x):
        dtype = jnp.bfloat16 if _is_bf16(x) else jnp.float32
        return (x @ np.asarray(weight(dtype, 72, 1024), np.float64).T,)


def _is_bf16(x) -> bool:
    return np.array_equal(x, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64))


@pytest.mark.parametrize("K, leaves", [(64, 1), (128, 2), (576, 1), (1536, 8), (512, 8), (768, 4), (960, 1), (4096, 8)])
def test_leaf_count(K, leaves):
    assert gemm.leaf_count(K) == leaves


@pytest.mark.parametrize("impl", ISO)
def test_tree_is_a_balanced_tree_of_chains(impl):
    """A rank that owns a contiguous share of the leaves owns a subtree: 2, 4 or 8 ranks give the same bits."""
    rng = np.random.default_rng(0)
    x, w = spread(rng, 20, 1024, dtype=jnp.bfloat16), weight(jnp.bfloat16, 72, 1024)
    whole = gemm.tree(x, w, region="r", impl=impl)
    leaf = lambda i: gemm.chain(  # noqa: E731
        x[:, i * 128 : (i + 1) * 128], w[:, i * 128 : (i + 1) * 128], region="r", impl=impl, out_dtype=jnp.float32
    )
    parts = [np.asarray(leaf(i)) for i in range(8)]
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    assert np.array_equal(bits(whole), bits(jnp.asarray(parts[0], jnp.bfloat16)))
    assert not np.array_equal(bits(parts[0]), bits(in_order)), "operands that do not reveal the order"


@pytest.mark.parametrize("impl", ISO)
def test_column_shards_have_the_whole_weights_bits(impl):
    x, w = spread(np.random.default_rng(0), 20, K), weight(jnp.bfloat16, 1024)
    run = lambda w: gemm.chain(x, w, region="r", impl=impl, out_dtype=jnp.float32)  # noqa: E731
    whole = run(w)
    for ranks in (2, 4, 8):
        size = 1024 // ranks
        parts = [run(w[i * size : (i + 1) * size]) for i in range(ranks)]
        assert same([jnp.concatenate(parts, axis=1)], [whole])


@pytest.mark.parametrize("impl", ISO)
@pytest.mark.parametrize("n", [8, 24, 64, 200, 520])
def test_a_stack_is_indexed_in_place(impl, n):
    rng = np.random.default_rng(1)
    stack, x = spread(rng, 3, n, K, binades=2), spread(rng, 5, K)
    run = jax.jit(lambda layer: gemm.chain(x, Weight(stack, layer), region="r", impl=impl))
    for layer in range(3):
        assert same([run(jnp.int32(layer))], [gemm.chain(x, stack[layer], region="r", impl=impl)])
    with pytest.raises(NotImplementedError, match="give a master of one layer"):
        jax.grad(lambda x: gemm.chain(x, Weight(stack, jnp.int32(0)), region="r", impl=impl).sum().astype(float))(x)


@pytest.mark.parametrize("impl", [*ISO, "native"])
def test_the_master_gets_the_gradient(impl):
    rng = np.random.default_rng(2)
    x, w = spread(rng, 40, K, binades=2), weight(jnp.bfloat16)
    master = w.astype(jnp.float32)

    def loss(value, master):
        return jnp.sum(gemm.chain(x, Weight(value, None, master), region="r", impl=impl, out_dtype=jnp.float32) ** 2)

    to_value, to_master = jax.grad(loss, argnums=(0, 1))(w, master)
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert to_master.dtype == jnp.float32 and not np.asarray(to_value, np.float32).any()
    assert relative(to_master, 2 * y.T @ np.asarray(x, np.float64)) < 1e-2

    def loss_in_stack(x, master):
        value = Weight(jnp.stack([w + 1, w]), jnp.int32(1), master)
        return jnp.sum(gemm.chain(x, value, region="r", impl=impl, out_dtype=jnp.float32) ** 2)

    def loss_alone(x, master):
        return jnp.sum(gemm.chain(x, Weight(w, None, master), region="r", impl=impl, out_dtype=jnp.float32) ** 2)

    assert same(jax.grad(loss_in_stack, (0, 1))(x, master), jax.grad(loss_alone, (0, 1))(x, master))


@pytest.mark.parametrize("impl", [*ISO, "native"])
def test_heads_are_flattened_inside(impl):
    rng = np.random.default_rng(3)
    x, w = spread(rng, 12, 4, 64, binades=2), spread(rng, 24, 4, 64, binades=2)
    master = w.astype(jnp.float32)
    flat = lambda x, master: gemm.tree(  # noqa: E731
        x.reshape(12, 256), Weight(w.reshape(24, 256), None, master.reshape(24, 256)), region="r", impl=impl
    )
    heads = lambda x, master: gemm.tree(x, Weight(w, None, master), region="r", impl=impl, contract_dims=2)  # noqa: E731
    assert same([heads(x, master)], [flat(x, master)])
    grads = [jax.grad(lambda x, m: jnp.sum(f(x, m).astype(jnp.float32) ** 2), (0, 1))(x, master) for f in (heads, flat)]  # noqa: B023
    assert same(*grads) and grads[0][0].shape == x.shape and grads[0][1].shape == master.shape
    with pytest.raises(ValueError, match="do not share K"):
        gemm.tree(x.reshape(12, 2, 128), w, region="r", impl=impl, contract_dims=2)


def test_faults_are_named():
    x = jnp.ones((4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="attn: x .* do not share K"):
        gemm.chain(x, jnp.ones((8, 32), jnp.bfloat16), region="attn", impl="reference")
    with pytest.raises(ValueError, match="cast one first"):
        gemm.chain(x, jnp.ones((8, 64), jnp.float32), region="attn", impl="reference")


@pytest.mark.parametrize("n", [64, 960, 3072, 49152, 152576])
def test_a_column_tile_lies_inside_an_eighth(n):
    """So 1, 2, 4 and 8 ranks call the same dots."""
    tile = reference.tile_n(n, "column")
    assert n // 8 % tile == 0 and tile <= 512
