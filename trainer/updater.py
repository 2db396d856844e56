"""Updater: the second half of a step. Minibatches, the gate, and the optimizer: a pure function of (state, rollout, step)."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from isomodel.specs import Params
from trainer import loss
from trainer.config import TrainConfig
from trainer.packing import Bucket, Packed, pack
from trainer.parity import Gate, ParityReport, enforce
from trainer.sampler import Rollout
from trainer.step import TrainState, TrainStep


@dataclasses.dataclass(frozen=True)
class Updated:
    """After a step's updates.

    Attributes:
      state: new weights and optimizer state. updates: optimizer steps that were made.
      metrics: by the names of metrics.jsonl.
    """

    state: TrainState
    updates: int
    metrics: dict[str, float]


class Updater:
    """Trains on rollouts.

    The gate looks at every trajectory that is trained on before its first update, before that update: under parity.check
    "first" at those of the first minibatch (all, when there is one minibatch), under "all" at the others too, scored once
    more under the rollout's weights.
    """

    def __init__(
        self, config: TrainConfig, step: TrainStep, buckets: tuple[Bucket, ...], *, reference: Params | None, dump: pathlib.Path
    ):
        """
        Args:
          reference: weights of the KL's reference in the compute dtype, where the objective has one.
          dump: file for the sequences of a failed gate.
        """
        self._config, self._step, self._buckets, self._reference, self._dump = config, step, buckets, reference, dump

    def update(
        self,
        state: TrainState,
        rollout: Rollout,
        *,
        step: int,
        version: int,
        updates: int,
        changing: Callable[[], None] = lambda: None,
        phase: Callable[[str], None] = lambda text: None,
    ) -> Updated:
        """All optimizer steps on a rollout.

        Args:
          state: its memory is taken by the first optimizer step.
          version: of the weights, the state's and the rollout's.
          updates: optimizer steps made before, in the whole run.
          changing: called just before the first optimizer step: until then nothing has changed.

        Raises:
          ParityError: the gate stops the run; nothing was changed, if no optimizer step came before.
          NonFiniteGradient: as above.
        """
        start = time.perf_counter()
        trajectories = rollout.trajectories
        check = self._config.parity.check
        gate = Gate(trajectories, version)
        due: list[int] = []
        report: ParityReport | None = None
        stats: list[loss.Stats] = []
        norms, rates, tokens = [], [], 0
        minibatches = list(self._minibatches(rollout, step))
        for number, (members, parts) in enumerate(minibatches):
            phase(f"train {number + 1}/{len(minibatches)}")
            gradients = self._step.zero_gradients(state)
            for part in parts:
                reference_T = None if self._reference is None else self._step.score(self._reference, part)
                gradients, logprobs_T, part_stats = self._step.accumulate(state, gradients, part, reference_T)
                stats.append(part_stats)
                tokens += int(part.micro.batch.q_start_S1[-1])
                if not norms and check != "off":
                    gate.observe(part, jax.device_get(logprobs_T), members)
            if not norms and check != "off":
                due += [i for i in members if i not in due]
                if check == "all":
                    self._score_rest(state.params, trajectories, gate, due)
                    due = list(range(len(trajectories)))
                report = gate.report(due)
                self._enforce(report, rollout, state.params, step)
            if not any(part.micro.loss_mask_T.any() for part in parts):
                continue  # nothing to learn from: momentum alone should not move the weights
            if not norms:
                changing()
            state, info = self._step.apply(state, gradients, updates + len(norms))
            norms.append(info["grad_norm"])
            rates.append(info["lr"])
        jax.block_until_ready(state)
        train_s = time.perf_counter() - start
        metrics = self._metrics(stats, len(minibatches), report)
        metrics |= {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "updates": len(norms),
            "time/train_s": train_s,
            "tokens_per_s/train": tokens / train_s,
        }
        if len(norms) > 1:
            metrics["grad_norm/max"] = max(norms)
        if rates:
            metrics["lr"] = rates[-1]
        return Updated(state, len(norms), metrics)

    def _minibatches(self, rollout: Rollout, step: int) -> Iterator[tuple[list[int], list[Packed]]]:
        """(trajectories by index, packed) of each optimizer step. Members of `Packed` index into the trajectories."""
        c = self._config
        n = len(rollout.trajectories)
        for epoch in range(c.train.epochs):
            order = np.arange(n)
            if c.train.minibatches > 1:
                order = np.random.default_rng([c.seed, step, epoch]).permutation(n)
            for members in np.array_split(order, c.train.minibatches):
                if not len(members):
                    continue
                members = sorted(members.tolist())
                chosen = [rollout.trajectories[i] for i in members]
                weights_N = loss.token_weights(
                    [t.loss_tokens for t in chosen], c.objective.aggregation, constant=c.objective.constant
                )
                yield members, pack(chosen, rollout.advantages_N[members], weights_N, self._buckets)

    def _score_rest(self, params: Params, trajectories, gate: Gate, seen: list[int]) -> None:
        rest = [i for i in range(len(trajectories)) if i not in seen]
        if not rest:
            return
        zeros = np.zeros(len(rest))
        for part in pack([trajectories[i] for i in rest], zeros, zeros, self._buckets):
            gate.observe(part, jax.device_get(self._step.score(params, part)), rest)

    def _enforce(self, report: ParityReport, rollout: Rollout, params: Params, step: int) -> None:
        def first_region(token_ids: np.ndarray, prompt_length: int) -> str:
            from isomodel import replay  # needed when a run has failed only

            return replay.first_divergent_region(self._step.cfg, self._step.numerics, params, token_ids, prompt_length)

        enforce(
            report,
            rollout.trajectories,
            step=step,
            stop=self._config.parity.on_mismatch == "stop",
            replay=first_region,
            dump=self._dump,
        )

    def _metrics(self, stats: list[loss.Stats], minibatches: int, report: ParityReport | None) -> dict[str, float]:
        """Of all minibatches together; `loss` is their mean."""
        nothing = {"loss": 0.0, "loss_tokens": 0.0, "ratio/max": math.nan}
        metrics = nothing | (loss.combine(stats) if stats else {})
        metrics["loss"] /= max(1, minibatches)
        if report is None:  # nothing was compared, and no number says otherwise
            return metrics | {
                "parity/max_abs": math.nan,
                "parity/mean_abs": math.nan,
                "parity/mismatched_tokens": 0,
                "parity/tokens": 0,
            }
        return metrics | report.metrics()
