"""Projections whose heads go to their places: operands of `qk_norm_rope.of_gemm` and of the two ops that it stands for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import qk_norm_rope
from pallas_kernels.gemm.hopper_small import small_gemm
from pallas_kernels.qk_norm_rope import hopper_of_gemm
from pallas_kernels.weight import Weight, as_weight
from tests.pallas_kernels.base import spread

REGIONS = ("qkv", "qk_norm_rope")
OPTIONS = dict(eps=1e-6, theta=1e4, max_positions=512)
LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call: T tokens, K KV heads of `groups` queries, head dim d, model width D, pages of `page` rows."""

    T: int
    K: int
    groups: int
    d: int
    D: int
    page: int
    has_norm: bool = True

    @property
    def count(self) -> int:
        """Of pages in a layer, twice what the tokens fill."""
        return -(-2 * self.T // self.page)


def operands(case: Case, seed: int = 0) -> list:
    """x, weight, positions, norms of queries and keys, pages of keys and values, slots: weights and pages in stacks.

    Values lie over 13 binades. Every fifth row goes nowhere, by one or by far. Weights and pages of other layers are NaN, and so is
    a part of the pages.
    """
    rng = np.random.default_rng(seed)
    T, K, g2, d, D = case.T, case.K, case.groups + 2, case.d, case.D
    other = jnp.arange(LAYERS) != 1
    hide = lambda x: jnp.where(other.reshape(-1, *[1] * (x.ndim - 1)), jnp.bfloat16(jnp.nan), x)  # noqa: E731
    norms = [None, None]
    if case.has_norm:
        norms = [hide(jnp.asarray(1 + 0.3 * rng.standard_normal((LAYERS, d)), jnp.bfloat16)) for _ in range(2)]
    pages = [np.asarray(spread(rng, LAYERS, case.count, case.page, K, d), jnp.bfloat16).copy() for _ in range(2)]
    for x in pages:
        x[:, ::2, 3] = np.nan
    slots = rng.permutation(case.count * case.page)[:T].astype(np.int32)
    slots[1::5] = [case.count * case.page if i % 2 else 2**30 for i in range(len(slots[1::5]))]
    positions = jnp.asarray(rng.integers(0, OPTIONS["max_positions"], T), jnp.int32)
    weight = hide(spread(rng, LAYERS, K, g2, d, D) * jnp.bfloat16(D**-0.5))
    return [spread(rng, T, D), weight, positions, *norms, *map(jnp.asarray, pages), jnp.asarray(slots)]


def _of_layer(w, layer):
    return None if w is None else Weight(w, layer)


def one(case: Case, schedule, impl, x, w, positions, q_norm, k_norm, k_pages, v_pages, slots, layer):
    """The op, by a schedule of its kernel where one is given."""
    weights = [_of_layer(v, layer) for v in (w, q_norm, k_norm)]
    if schedule is None:
        args = x, weights[0], positions, *weights[1:], k_pages, v_pages, slots, layer
        return qk_norm_rope.of_gemm(*args, **OPTIONS, regions=REGIONS, impl=impl)
    table = dict(theta=OPTIONS["theta"], max_positions=OPTIONS["max_positions"], head_dim=case.d, dtype=jnp.bfloat16)
    norms = tuple(map(as_weight, weights[1:])) if case.has_norm else ()
    rotations = qk_norm_rope.rotations(positions, **table)
    args = x, weights[0], rotations, norms, OPTIONS["eps"], k_pages, v_pages, slots, layer
    return hopper_of_gemm.of_gemm(*args, schedule)


def turned(impl: str, qkv, positions, q_norm, k_norm, k_pages, v_pages, slots, layer):
    """The op of projected rows [T, K, G + 2, d]."""
    norms = [_of_layer(v, layer) for v in (q_norm, k_norm)]
    places = k_pages, v_pages, slots, layer
    return qk_norm_rope.to_pages(qkv, positions, *norms, *places, **OPTIONS, region=REGIONS[1], impl=impl)


def two(case: Case, schedule, x, w, positions, q_norm, k_norm, k_pages, v_pages, slots, layer):
    """(projected rows, what of them becomes) by two kernels, the GEMM by this schedule for few tokens, or by the table's."""
    qkv = small_gemm(x, w.reshape(LAYERS, -1, case.D), layer, 1, jnp.bfloat16, schedule=schedule)
    qkv = qkv.reshape(case.T, case.K, case.groups + 2, case.d)
    return qkv, *turned("hopper", qkv, positions, q_norm, k_norm, k_pages, v_pages, slots, layer)


def shapes(case: Case) -> list:
    """Of `operands`."""
    T, K, g2, d, D = case.T, case.K, case.groups + 2, case.d, case.D
    of = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    norms = [of(LAYERS, d) if case.has_norm else None for _ in range(2)]
    pages = [of(LAYERS, case.count, case.page, K, d) for _ in range(2)]
    row = of(T, dtype=jnp.int32)
    return [of(T, D), of(LAYERS, K, g2, d, D), row, *norms, *pages, row]


def lowered(case: Case, call, *more) -> str:
    """The program of call(case, *more, *operands, layer), lowered for CUDA."""
    args = *shapes(case), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(lambda *a: call(case, *more, *a)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
