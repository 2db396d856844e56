"""qk_norm_rope inside the GEMM that feeds it: the bits of the two ops, whatever the schedule, the tokens and their neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemm
from tests.pallas_kernels import rope_of_gemm_work as work
from tests.pallas_kernels.base import bits, same
from tests.pallas_kernels.rope_of_gemm_work import Case
from tests.pallas_kernels.test_hopper_rope_of_gemm import schedules_of, shaped

LAYER = jnp.int32(1)
TOKENS = [
    *(("smollm2", T) for T in (1, 8, 9, 16, 31, 64, 100, 200, 256)),
    *(("qwen3-0.6b", T) for T in (9, 16, 33, 64, 65, 128, 129, 250, 256)),
    *(("qwen3-8b", T) for T in (33, 64, 100, 200, 256)),
]


@functools.partial(jax.jit, static_argnums=(0, 1))
def one(case: Case, schedule, *args):
    return work.one(case, schedule, "hopper", *args)


@functools.partial(jax.jit, static_argnums=0)
def two(case: Case, x, w, *rows):
    """Of the GEMM that the op picks, for few tokens or for many."""
    qkv = gemm.chain(x, w[rows[-1]], region=work.REGIONS[0], impl="hopper")
    return work.turned("hopper", qkv.reshape(case.T, case.K, case.groups + 2, case.d), *rows)


@functools.cache
def operands(case: Case):
    return work.operands(case)


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("model, T", TOKENS)
def test_the_bits_of_two_ops(model, T, page):
    case = shaped(model, T, page)
    args = *work.operands(case), LAYER
    got = one(case, None, *args)
    assert same(got, two(case, *args))
    assert not same(got[1:], args[5:7]), "control: something was written"
    assert np.isfinite(np.asarray(got[0], np.float32)).all() and len(np.unique(bits(got[0]))) > 300


GROUPS = {64: (3, 2), 128: (2, 3), 256: (1, 1)}
"""K, G by head dim: the last tile of two heads of 64 is half past the end."""


@pytest.mark.parametrize("d, schedule", [(d, s) for d in GROUPS for s in schedules_of(d)], ids=str)
def test_every_schedule_of_the_tables(d, schedule):
    """With a norm, of ragged tokens, programs of clusters of all sizes."""
    case = Case(schedule.tokens * schedule.join - 3, *GROUPS[d], d, 1024, 16)
    args = *operands(case), LAYER
    assert same(one(case, schedule, *args), two(case, *args))


@pytest.mark.parametrize("model, T", [("smollm2", 16), ("qwen3-0.6b", 200)])
def test_neighbours_do_not_reach_a_row(model, T):
    """NaN in every other row, and one ULP in one: the control that a row's own operands do reach it."""
    case = shaped(model, T)
    x, *rest = *operands(case), LAYER
    odd = np.arange(T) % 2 == 1
    clean = one(case, None, x, *rest)
    dirty = one(case, None, jnp.where(odd[:, None], jnp.nan, x), *rest)
    assert np.isnan(np.asarray(dirty[0], np.float32)[odd]).all() and same([dirty[0][~odd]], [clean[0][~odd]])
    slots = np.asarray(rest[6])[~odd]
    slots = slots[slots < case.count * case.page]
    rows = lambda pages: pages[1].reshape(-1, case.K, case.d)[slots]  # noqa: E731
    assert same([rows(x) for x in dirty[1:]], [rows(x) for x in clean[1:]])
    changed = np.array(x)
    changed.view(np.uint16)[5] ^= 1
    differs = bits(one(case, None, jnp.asarray(changed), *rest)[0]) != bits(clean[0])
    assert np.flatnonzero(differs.any(axis=(1, 2))).tolist() == [5]


def test_a_donated_cache_is_written_in_place():
    case = shaped("smollm2", 16)
    args = *work.operands(case), LAYER
    places = [x.unsafe_buffer_pointer() for x in args[5:7]]
    call = jax.jit(functools.partial(work.one, case, None, "hopper"), donate_argnums=(5, 6))
    assert [x.unsafe_buffer_pointer() for x in call(*args)[1:]] == places
