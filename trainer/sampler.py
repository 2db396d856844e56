"""Sampler: the first half of a step. Prompts, completions, rewards, advantages: a pure function of (weights, seed, step)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isomodel.rollout import Completion, Engine, SamplingParams
from trainer.advantages import group_advantages, has_signal, overlong_penalty
from trainer.config import TrainConfig
from trainer.data import Dataset, Item
from trainer.metrics import rollout_metrics
from trainer.rewards import Response, Rewards
from trainer.trajectory import Trajectory, from_completion

TRAINING, EVALUATION = 0, 1
"""First part of a request seed's key: samples for training and for evaluation share nothing."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What a step trains on, and what is told of it.

    Attributes:
      trajectories: N of them, the samples of a prompt together.
      advantages_N: float64.
      metrics: of everything that was sampled, by the names of metrics.jsonl.
      samples: one object a response, for samples/.
    """

    trajectories: list[Trajectory]
    advantages_N: np.ndarray
    metrics: dict[str, float]
    samples: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """Responses to P prompts, G each, in order; rewards before and after shaping."""

    items: list[Item]
    completions: list[Completion]
    rewards_PG: np.ndarray
    shaped_PG: np.ndarray
    terms: Mapping[str, np.ndarray]
    timeouts: int
    errors: int
    generate_s: float
    reward_s: float


def request_seed(seed: int, kind: int, *where: int) -> int:
    """Seed of a request: 53 bits, so that JSON readers keep it exactly. `where`: step, sampling round, prompt."""
    words = np.random.SeedSequence(seed, spawn_key=(kind, *where)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(11))


class Sampler:
    """Samples and judges the responses of a step."""

    def __init__(
        self, config: TrainConfig, engine: Engine, dataset: Dataset, rewards: Rewards, stop_token_ids: tuple[int, ...]
    ):
        r = config.rollout
        self._config, self._engine, self._dataset, self._rewards = config, engine, dataset, rewards
        self._sampling = SamplingParams(
            temperature=r.temperature,
            top_k=r.top_k,
            top_p=r.top_p,
            min_p=r.min_p,
            max_tokens=r.max_tokens,
            stop=r.stop,
            stop_token_ids=stop_token_ids,
            n=r.samples_per_prompt,
        )

    def rollout(self, step: int, phase: Callable[[str], None] = lambda text: None) -> Rollout:
        """The responses of step `step` (1-based).

        With dynamic sampling, groups whose rewards are all equal are left out and more prompts are sampled in their
        place, for objective.dynamic_sampling.max_rounds rounds at most; then the step has the groups that it has.

        Raises:
          RewardError: a reward function failed.
        """
        c = self._config
        dynamic = c.objective.dynamic_sampling
        P = c.rollout.prompts_per_step
        rounds: list[Judged] = []
        kept: list[tuple[Judged, int]] = []  # groups
        while len(kept) < P and len(rounds) < (dynamic.max_rounds if dynamic.enabled else 1):
            judged = self._round(step, len(rounds), phase)
            rounds.append(judged)
            signal_P = has_signal(judged.rewards_PG) if dynamic.enabled else np.ones(P, np.bool_)
            kept += [(judged, p) for p in np.flatnonzero(signal_P)]
        kept = kept[:P]
        G = c.rollout.samples_per_prompt
        shaped_PG = np.stack([j.shaped_PG[p] for j, p in kept]) if kept else np.zeros((0, G))
        advantages_PG = group_advantages(shaped_PG, normalize_std=c.objective.normalize_std)
        trajectories = [self._trajectory(x) for j, p in kept for x in j.completions[p * G : (p + 1) * G]]
        advantages = {(id(j), p): a for (j, p), a in zip(kept, advantages_PG, strict=True)}
        metrics = self._metrics(rounds)
        if dynamic.enabled:
            metrics |= {"dynamic/rounds": len(rounds), "dynamic/groups": len(kept)}
        samples = [s for j in rounds for s in _samples(j, {p: advantages.get((id(j), p)) for p in range(P)})]
        return Rollout(trajectories, advantages_PG.reshape(-1), metrics, samples)

    def _round(self, step: int, round_: int, phase: Callable[[str], None]) -> Judged:
        c = self._config
        P, G = c.rollout.prompts_per_step, c.rollout.samples_per_prompt
        items = self._dataset.batch(step - 1, P, round_)
        params = [
            dataclasses.replace(self._sampling, seed=request_seed(c.seed, TRAINING, step, round_, p)) for p in range(P)
        ]
        phase("generate" if round_ == 0 else f"generate, round {round_ + 1}")
        completions, generate_s = generate(self._engine, items, params)
        phase("reward")
        start = time.perf_counter()
        batch = self._rewards([items[i // G] for i in range(P * G)], [response(x) for x in completions])
        rewards_PG = batch.total_N.reshape(P, G)
        shaped_PG = rewards_PG
        if c.objective.overlong.buffer:
            penalty_N = overlong_penalty(
                [len(x.token_ids) for x in completions], max_length=c.rollout.max_tokens, buffer=c.objective.overlong.buffer
            )
            shaped_PG = rewards_PG + c.objective.overlong.penalty * penalty_N.reshape(P, G)
        reward_s = time.perf_counter() - start
        return Judged(
            items, completions, rewards_PG, shaped_PG, batch.terms, batch.timeouts, batch.errors, generate_s, reward_s
        )

    def _trajectory(self, completion: Completion) -> Trajectory:
        trajectory = from_completion(completion)
        if self._config.objective.overlong.mask and completion.finish_reason == "length":
            return trajectory.without_loss()
        return trajectory

    def _metrics(self, rounds: Sequence[Judged]) -> dict[str, float]:
        completions = [x for j in rounds for x in j.completions]
        lengths_N = [len(x.token_ids) for x in completions]
        rewards_N = np.concatenate([j.rewards_PG.reshape(-1) for j in rounds])
        generate_s = sum(j.generate_s for j in rounds)
        metrics = rollout_metrics(
            rewards_N, self._config.rollout.samples_per_prompt, lengths_N, [x.finish_reason for x in completions]
        )
        if len(rounds[0].terms) > 1:
            terms = rounds[0].terms
            metrics |= {f"reward/{name}": float(np.concatenate([j.terms[name] for j in rounds]).mean()) for name in terms}
        if self._config.objective.overlong.buffer:
            shaped_N = np.concatenate([j.shaped_PG.reshape(-1) for j in rounds])
            metrics["reward/shaped_mean"] = float(shaped_N.mean())
        for name in ("timeouts", "errors"):
            if count := sum(getattr(j, name) for j in rounds):
                metrics[f"reward/{name}"] = count
        return metrics | {
            "time/generate_s": generate_s,
            "time/reward_s": sum(j.reward_s for j in rounds),
            "tokens_per_s/generate": sum(lengths_N) / generate_s,
        }


def generate(
    engine: Engine, items: Sequence[Item], params: Sequence[SamplingParams]
) -> tuple[list[Completion], float]:
    """Completions of the items' prompts, the samples of each together, and the seconds that took."""
    start = time.perf_counter()
    completions = engine.generate([item.prompt_ids for item in items], params)
    return completions, time.perf_counter() - start


def response(completion: Completion) -> Response:
    """A completion as rewards see it."""
    return Response(completion.text, completion.finish_reason, len(completion.token_ids))


def _samples(judged: Judged, advantages_P: Mapping[int, np.ndarray | None]) -> list[dict[str, Any]]:
    P, G = judged.rewards_PG.shape
    out = []
    for p in range(P):
        for g in range(G):
            i = p * G + g
            completion, advantages_G = judged.completions[i], advantages_P[p]
            out.append(
                {
                    "item": judged.items[p].id,
                    "prompt": judged.items[p].prompt,
                    "answer": judged.items[p].answer,
                    "response": completion.text,
                    "reward": float(judged.rewards_PG[p, g]),
                    "rewards": {name: float(values[i]) for name, values in judged.terms.items()},
                    "advantage": None if advantages_G is None else float(advantages_G[g]),
                    "finish_reason": completion.finish_reason,
                    "tokens": len(completion.token_ids),
                    "seed": completion.seed,
                }
            )
    return out
