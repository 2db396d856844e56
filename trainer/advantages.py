"""Advantages from the rewards of a group of samples of one prompt; DAPO's dynamic sampling and overlong shaping.

Computed on the host in float64: a few numbers a step, the same on every machine.
"""

from __future__ import annotations

import numpy as np

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing. It damps groups that differ by less than this; equal ones are 0."""


def group_advantages(rewards_PG, *, baseline: str = "mean", normalize_std: bool = True) -> np.ndarray:
    """Advantage of each of G samples of P prompts; float64 [P, G].

    baseline "mean": r - mean of the group (GRPO, DeepSeekMath, arXiv 2402.03300, section 4.1.2; without the division by
    the standard deviation it is Dr. GRPO's, arXiv 2503.20783, section 3.2). "leave_one_out": r - mean of the other G - 1
    (RLOO, arXiv 2402.14740, section 2.3), which is the former times G / (G - 1).
    normalize_std: divide by the group's sample standard deviation (G - 1 in the denominator, as TRL and verl do).

    A group of equal rewards has advantage exactly 0, whatever rounding makes of its mean.

    Raises:
      ValueError: a reward is not finite, or fewer than two samples a prompt, or an unknown baseline.
    """
    rewards_PG = _finite(rewards_PG)
    if rewards_PG.shape[1] < 2:
        raise ValueError("group advantages need at least 2 samples a prompt: one sample has nothing to be compared with")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline {baseline!r}; choose mean or leave_one_out")
    G = rewards_PG.shape[1]
    advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if baseline == "leave_one_out":
        advantages_PG = advantages_PG * (G / (G - 1))
    if normalize_std:
        advantages_PG = advantages_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)
    return np.where(has_signal(rewards_PG)[:, None], advantages_PG, 0.0)


def has_signal(rewards_PG) -> np.ndarray:
    """bool [P]: groups whose rewards are not all equal. DAPO's dynamic sampling (arXiv 2503.14476, section 3.2, eq. 11)
    samples again in place of the others, whose advantages, and so whose gradients, are 0.
    """
    rewards_PG = _finite(rewards_PG)
    return (rewards_PG != rewards_PG[:, :1]).any(axis=1)


def overlong_penalty(lengths_N, *, max_length: int, buffer: int) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), added to the reward; float64 [N], in [-1, 0].

    0 up to max_length - buffer tokens, falling linearly to -1 at max_length, -1 beyond. `lengths_N` counts completion
    tokens.

    Raises:
      ValueError: buffer is not in 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}, want 1 to the {max_length} tokens of a completion")
    lengths_N = np.asarray(lengths_N, np.float64)
    return np.clip((max_length - buffer - lengths_N) / buffer, -1.0, 0.0)


def _finite(rewards_PG) -> np.ndarray:
    rewards_PG = np.asarray(rewards_PG, np.float64)
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards have shape {rewards_PG.shape}, want [prompts, samples of a prompt]")
    bad = np.argwhere(~np.isfinite(rewards_PG))
    if len(bad):
        p, g = bad[0]
        raise ValueError(f"{len(bad)} rewards are not finite; first: prompt {p}, sample {g}: {rewards_PG[p, g]}")
    return rewards_PG
