"""Sampling by the Gumbel-max trick with counter-based random bits: a request's token depends on its seed, its position, its
parameters and its logits, and on nothing else in the batch.

The noise of vocabulary entry v at position t is Threefry-2x32 (Salmon et al. 2011) of counter (t, v) under the request's
key. The token is the lowest index of the largest z / temperature + noise among the kept entries. Truncation: top-k (ties
at the edge: lowest index first), then top-p over the renormalised rest, in fixed point (probabilities as integers sum
exactly in any order), then min-p relative to the largest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import registry


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    positions_B: jax.Array,
    inv_temp_B: jax.Array,
    top_k_B: jax.Array,
    top_p_B: jax.Array,
    min_p_B: jax.Array,
    *,
    regions: tuple[str, str | None],
    impl: str,
    fixed: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a row, and its log-probabilities.

    Args:
      logits_BV: fp32 [B, V padded with -inf].
      keys_B2: uint32 [B, 2], the request's seed.
      positions_B: int32 [B], index that the token will have in its sequence.
      inv_temp_B: fp32 [B], 1 / temperature; 0 for greedy (the largest logit, lowest index).
      top_k_B: int32 [B], how many of the largest entries to keep; 0 keeps all.
      top_p_B: fp32 [B] in (0, 1], smallest set of largest entries with at least this probability; 1 keeps all.
      min_p_B: fp32 [B] in [0, 1], keep entries with at least this share of the largest's probability; 0 keeps all.
      regions: names in the contract of the choice and of the log-probability; without the latter's, log-probabilities of all
        rows that keep all entries are 0, not computed.
      impl: "reference", "hopper" or "native".
      fixed: what `fixed_of` gives for the same rows, of a loop that samples them many times; None to derive it here.

    Returns:
      (tokens int32 [B]; log-probability of each over the whole vocabulary, fp32 [B], nats, the contract's
      (pallas_kernels.logprob), at temperature 1 for greedy; log-probability under the truncated, renormalised distribution,
      fp32 [B], 0 for greedy: in rows that keep all entries it is the other one).

    Raises:
      registry.Unsupported: no such implementation.
    """
    module = registry.implementation("sample", impl)
    registry.record(regions[0], module.entry(logits_BV.shape[1]))
    if regions[1] is not None:
        registry.record(regions[1], registry.implementation("logprob", impl).entry(logits_BV.shape[1]))
    rows = (keys_B2, positions_B, inv_temp_B, top_k_B, top_p_B, min_p_B)
    options = {"fixed": fixed} if impl == "hopper" else {}
    tokens_B, logprob_B, truncated_B = module.sample(logits_BV, *rows, with_logprob=regions[1] is not None, **options)
    # By row, not by batch: a row's bits must not tell whether its neighbours truncate.
    truncated_B = jnp.where(truncates(top_k_B, top_p_B, min_p_B), truncated_B, logprob_B)
    return tokens_B, logprob_B, jnp.where(inv_temp_B == 0, 0, truncated_B)


def fixed_of(keys_B2, inv_temp_B, top_k_B, top_p_B, min_p_B, *, impl: str) -> Any:
    """What `sample` derives from rows' parameters alone (arguments as there), for its `fixed`; None where that is nothing."""
    if impl != "hopper":
        return None
    return registry.implementation("sample", impl).fixed_of(keys_B2, inv_temp_B, top_k_B, top_p_B, min_p_B)


def truncates(top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """Which rows may drop entries, bool [B]."""
    return (top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)
