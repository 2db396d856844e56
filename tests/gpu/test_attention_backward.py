"""The Hopper attention backward on the GPU: gradients against float64, the same bits every run, and nothing from outside a
sequence in them.

How a sequence is packed may reach the bits of dq, dk and dv: tiles of queries begin where TMA lets them.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention as op
from pallas_kernels.attention import hopper, hopper_backward
from tests.pallas_kernels.attention_work import Work, differences, draw, own_pages, wide
from tests.pallas_kernels.base import bits, errors, relative

backward = jax.jit(hopper_backward.attention_backward)

WHOLE = ((300, 0), (1, 0), (129, 0), (0, 0), (64, 0), (391, 0))
CHUNKS = ((100, 300), (1, 700), (0, 90), (130, 1), (64, 65))


@pytest.mark.parametrize(
    "d, H, K, page, lengths",
    [
        (128, 8, 2, 128, WHOLE),
        (128, 16, 1, 8, CHUNKS),
        (64, 6, 2, 32, WHOLE),
        (64, 2, 2, 128, CHUNKS),
        (256, 8, 1, 128, WHOLE),
        (256, 4, 2, 16, CHUNKS),
    ],
)
def test_gradients_against_float64(d, H, K, page, lengths):
    work = Work(lengths, H, K, d, page)
    got = backward(*work.args)
    for name, g, want in zip(("dq", "dk", "dv"), got, work.want, strict=True):
        assert relative(wide(g), want) < 4e-3, name
    assert work.exact_zeros(got)


@functools.cache
def many(d: int, H: int, K: int):
    """Two sequences of 8192 rows in all: as many programs wait for each other as the GPU holds."""
    T, lengths = 8192, np.array([8192 - 777, 777], np.int32)
    table, N = own_pages(lengths, 128)
    inputs = (draw(0, T, H, d), draw(1, N, 128, K, d), draw(2, N, 128, K, d))
    where = jnp.array([0, T - 777, T], jnp.int32), jnp.asarray(lengths), jnp.asarray(table)
    o_THd, lse_TH = jax.jit(hopper.attention)(*inputs, *where, None)
    return (*inputs, *where, o_THd, lse_TH, draw(3, T, H, d))


@pytest.mark.parametrize("d, H, K", [(64, 8, 2), (128, 32, 8), (256, 8, 2)])
def test_every_run_has_the_same_bits(d, H, K):
    args = many(d, H, K)
    held = lambda: [bits(jnp.copy(x)) for x in args]  # noqa: E731  (of the device: JAX keeps what it fetched once)
    before = held()
    lines = differences([[np.asarray(x) for x in backward(*args)] for _ in range(6)], args)
    assert not lines, "\n".join(lines)
    assert all(map(np.array_equal, before, held())), "an argument was written to"


def test_the_order_is_what_keeps_the_bits(monkeypatch):
    """The control: programs that do not wait for their turn. dk and dv need none."""
    args = many(128, 32, 8)
    monkeypatch.setattr(plgpu, "semaphore_wait", lambda *args, **options: None)
    hasty = jax.jit(lambda *args: hopper_backward.attention_backward(*args))
    lines = differences([[np.asarray(x) for x in hasty(*args)] for _ in range(10)], args)
    assert lines, "no run differs"
    others = [line for line in lines if ", dq:" not in line]
    assert not others, "\n".join(others)


@pytest.mark.parametrize("d, H, K", [(64, 6, 2), (128, 8, 2), (256, 4, 2)])
def test_through_the_op(d, H, K):
    """jax.vjp of the op: our own output and log-sum-exp."""
    work = Work(WHOLE, H, K, d, 32)
    *inputs, start, kv_len, table = work.inputs

    @jax.jit
    def grads(inputs, do):
        run = lambda *x: op.attention(*x, start, kv_len, table, region="r", impl="hopper")  # noqa: E731
        return jax.vjp(run, *inputs)[1](do)

    for g, want in zip(grads(inputs, work.do), work.want, strict=True):
        assert relative(wide(g), want) < 5e-3


def test_error_is_no_larger_than_cudnns():
    """Of one sequence. Both sides round P and dS to bf16, where the error comes from."""
    work = Work(((1024, 0),), 8, 2, 128, 128, padding=0, scale=2.0)
    q, k_pages, v_pages, *_, table = work.inputs
    pages = np.asarray(table[0, :8])
    paged = lambda x: x[pages].reshape(1024, 2, 128)  # noqa: E731
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    cudnn = jax.jit(lambda *x: jax.vjp(run, *x[:3])[1](x[3]))(
        q[None], paged(k_pages)[None], paged(v_pages)[None], work.do[None]
    )
    ours = backward(*work.args)
    for name, cut, mine, its, want in zip(
        ("dq", "dk", "dv"), (lambda x: x, paged, paged), ours, cudnn, work.want, strict=True
    ):
        mine, its = errors(f"{name}, 1024 tokens", wide(cut(mine)), wide(its[0]), cut(want))
        assert mine <= its, name


def test_native_baseline_trains_through_cudnn():
    work = Work(WHOLE, 8, 2, 128, 128)
    q, k_pages, v_pages, *where = work.inputs
    inputs = [jnp.nan_to_num(x) for x in (q, k_pages, v_pages)]
    run = lambda *x: op.attention(*x, *where, region="r", impl="native")  # noqa: E731
    o, grads = jax.jit(lambda inputs, do: (run(*inputs), jax.vjp(run, *inputs)[1](do)))(inputs, work.do)
    assert relative(wide(o), work.o) < 5e-3
    for g, want in zip(grads, work.want, strict=True):
        assert relative(wide(g), want) < 5e-3
