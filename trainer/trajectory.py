"""Trajectory: what the trainer consumes. Token segments with log-probabilities, loss mask, weight version, inv_temp.

One prompt and one completion is the simplest trajectory. A conversation with tools is the same type: the policy's turns
are sampled segments, everything else (prompt, tool output, the next user turn) is context. A completion whose weights
changed in flight is several sampled segments, one a version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from isomodel.rollout import Completion


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of tokens that came from one place under one version of the weights. n tokens, at least one.

    Attributes:
      token_ids: int32 [n].
      logprobs: fp32 [n], the rollout's own log-probability of each token (log-softmax of logits * inv_temp over the whole
        vocabulary, nats, <= 0); NaN where the policy sampled nothing: an absent observation is never a number.
      loss_mask: bool [n], tokens that the loss counts. Each has a log-probability.
      weight_version: version of the weights that computed these tokens' log-probabilities, keys and values.
      inv_temp: fp32, 1 / temperature of the request (1 for greedy requests and for context).
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    weight_version: int
    inv_temp: np.float32 = np.float32(1.0)

    def __post_init__(self):
        for field, dtype in (("token_ids", np.int32), ("logprobs", np.float32), ("loss_mask", np.bool_)):
            given = np.asarray(getattr(self, field))
            if given.dtype.kind != np.dtype(dtype).kind and given.size:
                raise ValueError(f"segment: {field} has dtype {given.dtype}, want {np.dtype(dtype)}")
            array = np.array(given, dtype, copy=True, ndmin=1)
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        object.__setattr__(self, "inv_temp", np.float32(self.inv_temp))
        faults = []
        n = self.token_ids.shape
        if len(n) != 1 or n[0] == 0:
            faults.append(f"token_ids has shape {n}, want [n] with n >= 1")
        for field in ("logprobs", "loss_mask"):
            if getattr(self, field).shape != n:
                faults.append(f"{field} has shape {getattr(self, field).shape}, token_ids has {n}")
        if not faults:
            if (self.token_ids < 0).any():
                faults.append(f"token id {self.token_ids.min()} is negative")
            missing = int((self.loss_mask & ~np.isfinite(self.logprobs)).sum())
            if missing:
                faults.append(f"{missing} tokens of the loss mask have no finite log-probability")
            if (self.logprobs > 0).any():
                faults.append(f"log-probability {np.nanmax(self.logprobs)} is above 0")
        if not (np.isfinite(self.inv_temp) and self.inv_temp > 0):
            faults.append(f"inv_temp is {self.inv_temp}, want a finite number above 0")
        if faults:
            raise ValueError("segment: " + "; ".join(faults))

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def context(cls, token_ids: Iterable[int], weight_version: int) -> Segment:
        """Tokens that the policy reads and did not sample: no log-probability, no loss."""
        ids = np.asarray(list(token_ids), np.int32)
        return cls(ids, np.full(ids.shape, np.nan, np.float32), np.zeros(ids.shape, np.bool_), weight_version)

    @classmethod
    def sampled(cls, token_ids: Iterable[int], logprobs, weight_version: int, inv_temp, *, loss: bool = True) -> Segment:
        """Tokens that the policy sampled; `loss=False` keeps them out of training, and the gate still looks at them.

        Raises:
          ValueError: a log-probability is missing or not finite.
        """
        ids = np.asarray(list(token_ids), np.int32)
        mask = np.ones(ids.shape, np.bool_)
        segment = cls(ids, np.asarray(logprobs, np.float32), mask, weight_version, inv_temp)
        return segment if loss else segment.without_loss()

    def without_loss(self) -> Segment:
        """The same tokens, none in the loss."""
        return dataclasses.replace(self, loss_mask=np.zeros(len(self), np.bool_))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A trajectory laid flat, n tokens; fields as in Segment, one value a token. `sampled` marks observed tokens."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    versions: np.ndarray
    inv_temp: np.ndarray

    @property
    def sampled(self) -> np.ndarray:
        """bool [n]: tokens for which the rollout claims a log-probability."""
        return ~np.isnan(self.logprobs)

    def under(self, version: int) -> np.ndarray:
        """bool [n]: tokens that `version` computed, and whose whole prefix it computed too."""
        return np.logical_and.accumulate(self.versions == version)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Segments in the order the policy saw them; the first token is context (nothing can predict it)."""

    segments: tuple[Segment, ...]

    def __post_init__(self):
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            raise ValueError("trajectory: no segments")
        if not np.isnan(self.segments[0].logprobs[0]):
            raise ValueError("trajectory: its first token has a log-probability, but no token comes before it")

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def loss_tokens(self) -> int:
        """How many tokens the loss counts."""
        return sum(int(s.loss_mask.sum()) for s in self.segments)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them, if none is sampled)."""
        sampled = self.flatten().sampled
        return int(np.argmax(sampled)) if sampled.any() else len(self)

    def flatten(self) -> Tokens:
        """The segments end to end."""
        s = self.segments
        return Tokens(
            token_ids=np.concatenate([x.token_ids for x in s]),
            logprobs=np.concatenate([x.logprobs for x in s]),
            loss_mask=np.concatenate([x.loss_mask for x in s]),
            versions=np.concatenate([np.full(len(x), x.weight_version, np.int64) for x in s]),
            inv_temp=np.concatenate([np.full(len(x), x.inv_temp, np.float32) for x in s]),
        )

    def without_loss(self) -> Trajectory:
        """The same tokens, none in the loss (an overlong sample that is filtered); the gate still looks at them."""
        return Trajectory(tuple(s.without_loss() for s in self.segments))


def split_by_version(token_ids: Sequence[int], logprobs, versions: Sequence[int], inv_temp) -> tuple[Segment, ...]:
    """Sampled segments of one completion, cut where the weights changed."""
    versions = np.asarray(versions, np.int64)
    logprobs = np.asarray(logprobs, np.float32)
    if not len(token_ids) == len(logprobs) == len(versions):
        raise ValueError(
            f"completion: {len(token_ids)} tokens, {len(logprobs)} log-probabilities, {len(versions)} weight versions"
        )
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(
        Segment.sampled(token_ids[a:b], logprobs[a:b], int(versions[a]), inv_temp)
        for a, b in zip(cuts, cuts[1:])
        if b > a
    )


def from_completion(completion: Completion) -> Trajectory:
    """A prompt and one sampled completion of it (isomodel.rollout.Completion).

    Raises:
      ValueError: it was aborted, is empty, or came without log-probabilities.
    """
    name = f"completion {completion.request_id}/{completion.index}"
    if completion.finish_reason == "abort" or not len(completion.token_ids):
        raise ValueError(f"{name} ended by {completion.finish_reason!r} with {len(completion.token_ids)} tokens")
    if completion.logprobs is None:
        raise ValueError(f"{name} has no log-probabilities; sample with logprobs=True")
    sampled = split_by_version(completion.token_ids, completion.logprobs, completion.versions, completion.inv_temp)
    return Trajectory((Segment.context(completion.prompt_ids, sampled[0].weight_version), *sampled))
