"""Norm of queries and keys (Qwen3) and rotary positions (Su et al. 2021, eq. 34; halves, as in Hugging Face), in one kernel.

Rounding points, as in Hugging Face's code: the normalised value is cast before its weight, the product is cast, cos and
sin are cast to the compute dtype, each of the two products is cast, and their sum is cast.
"""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gemm, registry
from pallas_kernels.weight import Weight, as_weight, of_backward


@functools.lru_cache(maxsize=8)
def rope_table(max_positions: int, head_dim: int, theta: float) -> np.ndarray:
    """cos and sin of every position: fp32 [max_positions, 2, head_dim / 2].

    Frequencies and angles are rounded to fp32 where Hugging Face's code does; powers, cosines and sines are taken in
    float64 and rounded once.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse_frequency = (1.0 / np.float64(theta) ** exponent).astype(np.float32)
    angle = (np.arange(max_positions, dtype=np.float32)[:, None] * inverse_frequency[None, :]).astype(np.float64)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


@functools.lru_cache(maxsize=8)
def rope_table_hash(max_positions: int, head_dim: int, theta: float) -> str:
    """SHA-256 of the table's bytes, for the contract."""
    return hashlib.sha256(rope_table(max_positions, head_dim, theta).tobytes()).hexdigest()


@functools.lru_cache(maxsize=8)
def rope_array(max_positions: int, head_dim: int, theta: float, dtype) -> jax.Array:
    """The table on the default device, in the compute dtype: made once a process, for programs that take it as an argument."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(rope_table(max_positions, head_dim, theta), dtype)


def rotations(
    positions_T: jax.Array, *, theta: float, max_positions: int, head_dim: int, dtype, table: jax.Array | None = None
) -> jax.Array:
    """cos and sin of each row's position, [T, 2, head_dim / 2] in `dtype`: the same for every layer.

    Args:
      positions_T: int32 [T], in [0, max_positions).
      table: `rope_array`'s; None makes the table a constant of the program that this is traced into.
    """
    if table is None:
        table = jnp.asarray(rope_table(max_positions, head_dim, theta), dtype)
    return jnp.take(table, positions_T, axis=0, mode="clip")


def qk_norm_rope(
    qkv_TKgd: jax.Array,
    positions_T: jax.Array,
    q_norm_d: Weight | jax.Array | None,
    k_norm_d: Weight | jax.Array | None,
    *,
    eps: float,
    theta: float,
    max_positions: int,
    region: str,
    impl: str,
    rotations_T2h: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits a fused projection into rotated queries, rotated keys, and values.

    Args:
      qkv_TKgd: [T, K, G + 2, d]: per KV head its G queries, its key, its value; bf16 or fp32.
      positions_T: int32 [T], in [0, max_positions).
      q_norm_d: [d] weight of the query norm, or None for no norm (then k_norm_d is None too).
      k_norm_d: [d] weight of the key norm.
      eps: added to the mean square.
      theta: base of the frequencies.
      max_positions: rows of the table.
      region: name of the region in the contract.
      impl: "reference", "hopper" or "native".
      rotations_T2h: what `rotations` gives for these positions and options; None makes it here.

    Returns:
      (q [T, H, d], k [T, K, d], v [T, K, d]) in the same dtype.

    Raises:
      ValueError: one norm weight without the other.
      registry.Unsupported: no such implementation.
    """
    options = dict(eps=eps, theta=theta, max_positions=max_positions, region=region, impl=impl)
    module, rotations_T2h, norms = _prepared(qkv_TKgd, positions_T, q_norm_d, k_norm_d, rotations_T2h, **options)
    if impl == "native":
        return module.qk_norm_rope(qkv_TKgd, rotations_T2h, tuple(w.trainable() for w in norms), eps)
    values, layers, masters = (tuple(getattr(w, name) for w in norms) for name in ("value", "layer", "master"))
    return _iso(impl, eps, qkv_TKgd, rotations_T2h, values, layers, masters)


def to_pages(
    qkv_TKgd: jax.Array,
    positions_T: jax.Array,
    q_norm_d: Weight | jax.Array | None,
    k_norm_d: Weight | jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slots_T: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    theta: float,
    max_positions: int,
    region: str,
    impl: str,
    rotations_T2h: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`qk_norm_rope`, with keys and values written to their pages: bytes move, nothing rounds. No gradient.

    Args:
      k_pages, v_pages: [L, N, p, K, d], stacks of layers, of qkv's dtype.
      slots_T: int32 [T], each row's place in its layer, page * p + offset, no two alike; N * p or more: it goes nowhere.
      layer: int32 scalar.
      The others: as `qk_norm_rope` takes them.

    Returns:
      (q [T, H, d], k_pages, v_pages).

    Raises:
      What `qk_norm_rope` raises.
    """
    options = dict(eps=eps, theta=theta, max_positions=max_positions, region=region, impl=impl)
    module, rotations_T2h, norms = _prepared(qkv_TKgd, positions_T, q_norm_d, k_norm_d, rotations_T2h, **options)
    if impl == "native":
        norms = tuple(w.trainable() for w in norms)
    return module.to_pages(qkv_TKgd, rotations_T2h, norms, eps, k_pages, v_pages, slots_T, layer)


def of_gemm(
    x_TD: jax.Array,
    w_KgdD: Weight | jax.Array,
    positions_T: jax.Array,
    q_norm_d: Weight | jax.Array | None,
    k_norm_d: Weight | jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slots_T: jax.Array,
    layer: jax.Array,
    *,
    eps: float,
    theta: float,
    max_positions: int,
    regions: tuple[str, str],
    impl: str,
    rotations_T2h: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`to_pages` of `gemm.chain`, the same bits, by one kernel where there is one for such shapes. No gradient.

    Args:
      x_TD: [T, D], bf16 or fp32.
      w_KgdD: [K, G + 2, d, D], the fused projection's weight, of the same dtype; a Weight or an array.
      regions: names of the GEMM's and of this op's region in the contract.
      The others: as `to_pages` takes them.

    Returns:
      (q [T, H, d], k_pages, v_pages).

    Raises:
      What `gemm.chain` and `to_pages` raise.
    """
    options = dict(eps=eps, theta=theta, max_positions=max_positions, region=regions[1], impl=impl)
    module, w = registry.implementation("qk_norm_rope", impl), as_weight(w_KgdD)
    heads = w.shape[:-1]
    schedule = module.schedule_of_gemm(x_TD, w, k_pages.dtype) if impl == "hopper" else None
    if schedule is None:
        qkv_TN = gemm.chain(x_TD, w, region=regions[0], impl=impl)
        rows = qkv_TN.reshape(len(x_TD), *heads), positions_T, q_norm_d, k_norm_d
        return to_pages(*rows, k_pages, v_pages, slots_T, layer, **options, rotations_T2h=rotations_T2h)
    gemm.prepared(x_TD, w, 1, "column", regions[0], impl)
    qkv = jax.ShapeDtypeStruct((len(x_TD), *heads), x_TD.dtype)
    _, rotations_T2h, norms = _prepared(qkv, positions_T, q_norm_d, k_norm_d, rotations_T2h, **options)
    return module.of_gemm(x_TD, w, rotations_T2h, norms, eps, k_pages, v_pages, slots_T, layer, schedule)


def _prepared(qkv_TKgd, positions_T, q_norm_d, k_norm_d, rotations_T2h, *, eps, theta, max_positions, region, impl):
    """(implementation, rotations, norms' weights), checked and recorded; of qkv shape and dtype are asked."""
    if (q_norm_d is None) != (k_norm_d is None):
        raise ValueError(f"{region}: give both norm weights or neither")
    module = registry.implementation("qk_norm_rope", impl)
    d, dtype = qkv_TKgd.shape[-1], qkv_TKgd.dtype
    has_norm = q_norm_d is not None
    table_hash = rope_table_hash(max_positions, d, theta)
    registry.record(region, module.entry(qkv_TKgd.shape[1:], eps, theta, table_hash, has_norm, dtype))
    if rotations_T2h is None:
        rotations_T2h = rotations(positions_T, theta=theta, max_positions=max_positions, head_dim=d, dtype=dtype)
    return module, rotations_T2h, tuple(as_weight(w) for w in (q_norm_d, k_norm_d)) if has_norm else ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _iso(impl, eps, qkv_TKgd, cos_sin_T2h, values, layers, masters):
    del masters
    norms = tuple(map(Weight, values, layers))
    return registry.implementation("qk_norm_rope", impl).qk_norm_rope(qkv_TKgd, cos_sin_T2h, norms, eps)


def _iso_fwd(impl, eps, qkv_TKgd, cos_sin_T2h, values, layers, masters):
    out = _iso(impl, eps, qkv_TKgd, cos_sin_T2h, values, layers, masters)
    return out, (qkv_TKgd, cos_sin_T2h, values, layers, tuple(m is not None for m in masters))


def _iso_bwd(impl, eps, saved, grads):
    qkv_TKgd, cos_sin_T2h, values, layers, to_master = saved
    norms = tuple(map(of_backward, values, layers, to_master))
    module = registry.implementation("qk_norm_rope", impl)
    dqkv_TKgd, dnorms = module.backward(qkv_TKgd, cos_sin_T2h, norms, grads, eps)
    values = tuple(None if m else g.astype(w.dtype) for g, w, m in zip(dnorms, norms, to_master, strict=True))
    masters = tuple(g if m else None for g, m in zip(dnorms, to_master, strict=True))
    return dqkv_TKgd, None, values, (None,) * len(norms), masters


_iso.defvjp(_iso_fwd, _iso_bwd)
