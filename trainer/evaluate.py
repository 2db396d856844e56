"""Evaluation on held-out prompts, by the run's own rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isomodel.rollout import Engine, SamplingParams
from trainer.config import EvalSection, RolloutSection
from trainer.data import Item
from trainer.rewards import Rewards
from trainer.sampler import EVALUATION, generate, request_seed, response


class Evaluation:
    """Judges the present weights of an engine.

    The seeds of its requests depend on the prompt alone, not on the step: two evaluations differ by the weights and by
    nothing else.
    """

    def __init__(
        self,
        section: EvalSection,
        rollout: RolloutSection,
        engine: Engine,
        items: Sequence[Item],
        rewards: Rewards,
        *,
        seed: int,
        stop_token_ids: tuple[int, ...] = (),
    ):
        """`items`: the held-out prompts to use; no training prompt is among them (data.Dataset)."""
        self._engine, self._items, self._rewards, self._n = engine, list(items), rewards, section.samples
        self._params = [
            SamplingParams(
                temperature=section.temperature,
                max_tokens=rollout.max_tokens,
                stop=rollout.stop,
                stop_token_ids=stop_token_ids,
                n=section.samples,
                seed=request_seed(seed, EVALUATION, i),
            )
            for i in range(len(self._items))
        ]

    def __call__(self) -> dict[str, float]:
        """eval/reward_mean, eval/reward_std (over prompts: of each one's mean), eval/reward_best (mean over prompts of
        the best sample, with several), eval/length_mean, eval/truncated, eval/prompts, eval/NAME of each of several
        reward terms, time/eval_s (generation).

        Raises:
          RewardError: a reward function failed.
        """
        completions, seconds = generate(self._engine, self._items, self._params)
        repeated = [item for item in self._items for _ in range(self._n)]
        batch = self._rewards(repeated, [response(x) for x in completions])
        rewards_PG = batch.total_N.reshape(-1, self._n)
        metrics = {
            "eval/reward_mean": float(rewards_PG.mean()),
            "eval/reward_std": float(rewards_PG.mean(axis=1).std()),
            "eval/length_mean": float(np.mean([len(x.token_ids) for x in completions])),
            "eval/truncated": float(np.mean([x.finish_reason == "length" for x in completions])),
            "eval/prompts": len(self._items),
            "time/eval_s": seconds,
        }
        if self._n > 1:
            metrics["eval/reward_best"] = float(rewards_PG.max(axis=1).mean())
        if len(batch.terms) > 1:
            metrics |= {f"eval/{name}": float(values.mean()) for name, values in batch.terms.items()}
        return metrics
