"""Policy-gradient objectives on given log-probabilities: grpo, dr_grpo, dapo, gspo, and a KL to a frozen reference.

An objective is three choices: at which level the importance ratio lives (token or sequence), how it is clipped, and how
tokens are averaged. The averages are over the whole minibatch: each token's share is made on the host (`token_weights`)
before packing, so cutting a minibatch into microbatches changes nothing but the order of sums.

The old log-probabilities are the rollout's own. Where the trainer's have the same bits, the ratio of the first minibatch
is exactly 1, and no second forward pass is needed to make that so.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from trainer.packing import MicroBatch

BAND = (0.9, 1.1)
"""Ratios outside are reported as out of band (the share that users of other stacks report)."""

Stats = dict[str, dict[str, jax.Array]]
"""{"sum": {..}, "max": {..}, "min": {..}}: fp32 scalars, combined over microbatches by `combine`."""


def token_weights(loss_tokens_N: Sequence[int], aggregation: str, *, constant: int | None = None) -> np.ndarray:
    """Share of the minibatch's loss of one token of each of N trajectories; float64 [N], 0 where there are none.

    Args:
      loss_tokens_N: loss tokens of every trajectory of the minibatch.
      aggregation: "sequence": the mean over sequences of each one's mean over tokens (GRPO, arXiv 2402.03300, eq. 3);
        "token": the mean over all tokens of the minibatch (DAPO, arXiv 2503.14476, eq. 8); "constant": the sum divided by
        sequences x constant, which does not depend on lengths (Dr. GRPO, arXiv 2503.20783, section 3.2).
      constant: tokens, the divisor of "constant": as a rule the longest completion that may be sampled.

    Raises:
      ValueError: unknown aggregation, or "constant" without its divisor.
    """
    n = np.asarray(loss_tokens_N, np.float64)
    some = n > 0
    if aggregation == "sequence":
        weights = 1.0 / (len(n) * np.maximum(n, 1))
    elif aggregation == "token":
        weights = np.full(len(n), 1.0 / max(n.sum(), 1))
    elif aggregation == "constant":
        if not constant:
            raise ValueError("aggregation constant needs its divisor (tokens)")
        weights = np.full(len(n), 1.0 / (len(n) * constant))
    else:
        raise ValueError(f"aggregation {aggregation!r}; choose sequence, token or constant")
    return np.where(some, weights, 0.0)


def policy_loss(
    logprobs_T: jax.Array,
    micro: MicroBatch,
    *,
    ratio: str,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    ref_logprobs_T: jax.Array | None = None,
) -> tuple[jax.Array, Stats]:
    """A microbatch's part of the minibatch's loss, fp32 scalar, and statistics of its loss tokens.

    With r the ratio of new to old probability and A the advantage, each token's loss is
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, eq. 7; the asymmetric bounds are DAPO's,
    eq. 10), times its weight. ratio "token": r of the token. "sequence": r of the sequence, length-normalised,
    exp(mean over its tokens of the log ratio) (GSPO, arXiv 2507.18071, eq. 7); the whole sequence lies in this microbatch.
    kl_coef adds kl_coef x the k3 estimate of KL(policy || reference) a token, exp(d) - d - 1 with d = ref - new
    (Schulman 2020; GRPO eq. 4), under the same weights.

    Args:
      logprobs_T: fp32, differentiable; values on rows outside the loss mask are ignored.
      ref_logprobs_T: fp32, the reference's log-probabilities; needed when kl_coef is not 0.

    Raises:
      ValueError: unknown ratio, or kl_coef without ref_logprobs_T.
    """
    if ratio not in ("token", "sequence"):
        raise ValueError(f"ratio {ratio!r}; choose token or sequence")
    if kl_coef and ref_logprobs_T is None:
        raise ValueError("a KL to the reference needs the reference's log-probabilities")
    mask_T, advantages_T = micro.loss_mask_T, micro.advantages_T
    log_ratio_T = jnp.where(mask_T, logprobs_T - micro.old_logprobs_T, 0.0)
    token_ratio_T = jnp.exp(log_ratio_T)
    S = micro.batch.kv_len_S.shape[0]
    # [S, T] masks and sums instead of a segment sum: no scatter, so no atomics on any device.
    member_ST = (micro.sequence_T[None, :] == jnp.arange(S)[:, None]) & mask_T[None, :]
    count_S = member_ST.sum(axis=1)
    sequence_log_ratio_S = jnp.where(member_ST, log_ratio_T[None, :], 0.0).sum(axis=1)
    if ratio == "token":
        ratio_T = token_ratio_T
    else:
        mean_S = sequence_log_ratio_S / jnp.maximum(count_S, 1)
        ratio_T = jnp.exp(jnp.where(member_ST, mean_S[:, None], 0.0).sum(axis=0))
    clipped_T = jnp.clip(ratio_T, 1.0 - clip_low, 1.0 + clip_high)
    loss_T = -jnp.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if kl_coef:
        d_T = jnp.where(mask_T, ref_logprobs_T - logprobs_T, 0.0)
        ref_kl_T = jnp.exp(d_T) - d_T - 1.0
        loss_T = loss_T + kl_coef * ref_kl_T
    loss = jnp.sum(jnp.where(mask_T, micro.weight_T * loss_T, 0.0))

    count = lambda x_T: jnp.sum(mask_T & x_T, dtype=jnp.float32)  # noqa: E731
    total = lambda x_T: jnp.sum(jnp.where(mask_T, x_T, 0.0))  # noqa: E731
    some_S = count_S > 0
    sequence_ratio_S = jnp.exp(sequence_log_ratio_S)
    stats = {
        "sum": {
            "loss": loss,
            "tokens": count(mask_T),
            "sequences": jnp.sum(some_S, dtype=jnp.float32),
            "clipped_low": count((ratio_T < 1.0 - clip_low) & (advantages_T < 0)),
            "clipped_high": count((ratio_T > 1.0 + clip_high) & (advantages_T > 0)),
            "out_of_band": count((token_ratio_T < BAND[0]) | (token_ratio_T > BAND[1])),
            "ratio": total(token_ratio_T),
            # KL(old || new) from old samples: the k3 estimate with d = new - old.
            "kl_old": total(token_ratio_T - log_ratio_T - 1.0),
            "neg_logprob": total(-logprobs_T),
        },
        "max": {
            "ratio": jnp.max(jnp.where(mask_T, token_ratio_T, -jnp.inf)),
            "sequence_ratio": jnp.max(jnp.where(some_S, sequence_ratio_S, -jnp.inf)),
        },
        "min": {
            "ratio": jnp.min(jnp.where(mask_T, token_ratio_T, jnp.inf)),
            "sequence_ratio": jnp.min(jnp.where(some_S, sequence_ratio_S, jnp.inf)),
        },
    }
    if kl_coef:
        stats["sum"]["ref_kl"] = total(ref_kl_T)
    return loss, stats


def combine(stats: Sequence[Stats]) -> dict[str, float]:
    """Statistics of a minibatch (or of a step) from its microbatches', in order, by the metrics' names.

    Ratios and shares are over loss tokens; `ratio/sequence_*` are products over a sequence's tokens. Keys are absent
    when there is no loss token at all, except `loss` and `loss_tokens`.
    """
    stats = jax.tree.map(float, jax.device_get(list(stats)))
    sums = {k: sum(s["sum"][k] for s in stats) for k in stats[0]["sum"]}
    tokens = sums["tokens"]
    out = {"loss": sums["loss"], "loss_tokens": tokens}
    if not tokens:
        return out
    out |= {
        "ratio/max": max(s["max"]["ratio"] for s in stats),
        "ratio/min": min(s["min"]["ratio"] for s in stats),
        "ratio/mean": sums["ratio"] / tokens,
        "ratio/out_of_band": sums["out_of_band"] / tokens,
        "ratio/sequence_max": max(s["max"]["sequence_ratio"] for s in stats),
        "ratio/sequence_min": min(s["min"]["sequence_ratio"] for s in stats),
        "clip/low": sums["clipped_low"] / tokens,
        "clip/high": sums["clipped_high"] / tokens,
        "kl/old": sums["kl_old"] / tokens,
        "logprob/mean": -sums["neg_logprob"] / tokens,
    }
    if "ref_kl" in sums:
        out["kl/ref"] = sums["ref_kl"] / tokens
    return out
