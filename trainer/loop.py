"""train: one run from config to final checkpoint. Everything that can be refused is refused before the first token.

A step is a pure function of (weights, optimizer state, config, step): prompts, request seeds and minibatches are derived
from the seed and the step, and the engine's bits depend on nothing that a restart changes. So a run that was killed goes
on from its newest checkpoint with the bits that it would have had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import time
from typing import Any

import jax

from isomodel import contract as contracts
from isomodel import device_memory, fetch, weights, yaml_config
from isomodel.rollout import Engine, EngineConfig
from isomodel.specs import Params, cast_params
from pallas_kernels import environment
from trainer.checkpoint import CheckpointError, load_arrays
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.display import Display
from trainer.evaluate import Evaluation
from trainer.interrupts import Interrupted, Interrupts
from trainer.metrics import MetricsWriter
from trainer.packing import Bucket, make_buckets
from trainer.policy import fingerprint, open_policy
from trainer.rewards import Rewards
from trainer.run_folder import RunError, RunFolder
from trainer.sampler import Sampler
from trainer.step import TrainState, TrainStep
from trainer.updater import Updater

MOST_SEQUENCES = 256
"""Sequences of one microbatch, at most: what is kept a sequence (pages, masks) stays small beside the rows."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a call of `train` ended.

    Attributes:
      folder: of the run. steps: that are finished and saved.
      interrupted: the signal that ended it early (SIGINT, SIGTERM), the run can be continued; None if none did.
      metrics: last row of metrics.jsonl that this call wrote; None if it wrote none.
    """

    folder: pathlib.Path
    steps: int
    interrupted: signal.Signals | None
    metrics: dict[str, float] | None


def train(
    config: TrainConfig, *, allow_config_change: bool = False, allow_numerical_change: bool = False
) -> RunResult:
    """Trains as the config says, or goes on with a run that its folder holds.

    Args:
      allow_config_change: continue a run under another config than it was begun with.
      allow_numerical_change: continue a run whose contract has other arithmetic (another machine, another version). The
        bits will differ from those that the run would have had.

    Raises:
      RunError: the run folder cannot be used, or the run's data or reference are not what they were.
      OutOfDeviceMemory: state, KV cache or an update do not fit on the device.
      ContractMismatch: trainer and engine, or the run and this program, do not compute alike.
      ParityError: the gate found a differing bit. RewardError: a reward failed. CheckpointError: no space to save.
        What was finished is saved (or was saved before), and the run can be continued.
      And what model, tokenizer, data and engine raise when they cannot be used; then nothing was computed.
    """
    environment.use(config.numerics.mode)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        try:
            with interrupts.abandonable():
                run = _Run(config, stack, allow_config_change)
                if run.finished:
                    return run.result()
                run.build(stack, allow_numerical_change)
        except Interrupted:
            return RunResult(config.run_folder, 0, interrupts.requested, None)
        return run.go(interrupts)


class _Run:
    """A run in this process: what it is made of, and where it stands."""

    def __init__(self, config: TrainConfig, stack: contextlib.ExitStack, config_change: bool):
        """Model, prompts, rewards and folder: what can be refused in seconds."""
        c = self._config = config
        self._policy = open_policy(c.model)
        dynamic = c.objective.dynamic_sampling
        dataset = Dataset(c.data, self._policy.tokenizer, rounds=dynamic.max_rounds if dynamic.enabled else 1)
        self._held_out = dataset.evaluation(c.eval.prompts) if c.eval.every else ()
        self._rewards = stack.enter_context(Rewards(c.reward, c.data))
        self._rewards.check([*dataset.train, *self._held_out])
        self._folder = stack.enter_context(RunFolder(c, allow_config_change=config_change))
        resumed = self._folder.resumed
        self._done = resumed.step if resumed else 0
        self._saved = self._done
        self._facts: dict[str, Any] = dict(resumed.facts) if resumed else {"data": dataset.fingerprint, "updates": 0}
        if self._facts["data"] != dataset.fingerprint:
            raise RunError(
                f"{self._folder.path} was begun with other prompts: {c.data.source} has changed since; bring the old data "
                "back, or choose another name"
            )
        self._display = stack.enter_context(
            Display(c.name, c.train.steps, first_step=self._done, every=c.log.every)
        )
        for note in self._folder.notes:
            self._display.note(note)
        if dataset.dropped:
            self._display.note(f"{dataset.dropped} prompts longer than {c.data.max_prompt_tokens} tokens were left out")
        if self.finished:
            self._display.note(f"{self._folder.path} has all its {self._done} steps; raise train.steps to go on")
        self._dataset = dataset
        self._changing = False  # a step's first optimizer step has run, and the step is not on the disk yet
        self._last_row: dict[str, float] | None = None

    @property
    def finished(self) -> bool:
        return self._done >= self._config.train.steps

    def result(self, interrupted: signal.Signals | None = None) -> RunResult:
        return RunResult(self._folder.path, self._done, interrupted, self._last_row)

    def build(self, stack: contextlib.ExitStack, numerical_change: bool) -> None:
        """Weights, trainer and engine, compiled; their contracts agreed on."""
        c, policy = self._config, self._policy
        self._step = TrainStep(policy.cfg, c.numerics, c.objective, c.optimizer, remat=c.train.remat)
        self._buckets = _buckets(c)
        self._state, reference = self._weights()
        self._engine = self._make_engine()
        self._agree(numerical_change)
        self._compile(has_reference=reference is not None)
        self._check_room()
        self._writer = stack.enter_context(
            MetricsWriter(
                self._folder.path, c.log, resumed_step=self._done, name=c.name, config=yaml_config.to_mapping(c)
            )
        )
        stop_ids = policy.stop_token_ids
        self._sampler = Sampler(c, self._engine, self._dataset, self._rewards, stop_ids)
        self._updater = Updater(
            c, self._step, self._buckets, reference=reference, dump=self._folder.path / "parity_failure.json"
        )
        self._evaluation = Evaluation(
            c.eval, c.rollout, self._engine, self._held_out, self._rewards, seed=c.seed, stop_token_ids=stop_ids
        )

    def _weights(self) -> tuple[TrainState, Params | None]:
        """(state to go on from, weights of the KL's reference in the compute dtype)."""
        c, policy, resumed = self._config, self._policy, self._folder.resumed
        needs_reference = c.objective.kl_coef > 0
        from_initial = needs_reference and c.objective.reference == "initial"
        initial = policy.initial_weights() if resumed is None or from_initial else None
        if initial is not None:
            present = fingerprint(initial)
            if self._facts.setdefault("initial_weights", present) != present:
                raise RunError(
                    f"the weights that {self._folder.path} was begun from have changed since, and the KL term needs them: "
                    f"bring back {c.model.path or 'model.config and model.init_seed'}"
                )
        reference = None
        if from_initial:
            reference = cast_params(initial, c.numerics.dtype)
        elif needs_reference:
            reference = weights.load(fetch.resolve(c.objective.reference), policy.cfg, c.numerics.dtype)
        abstract = self._step.abstract_state()
        device_memory.require(
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract)),
            "the trainer's state (fp32 weights, two moments, the compute copy)",
            "choose a smaller model, or a device with more memory",
        )
        if resumed is None:
            return self._step.init(initial), reference
        arrays = load_arrays(resumed, {"masters": abstract.masters, "optimizer": abstract.optimizer})
        self._display.note(f"going on after step {resumed.step} of {self._folder.path}")
        return self._step.restore(**arrays), reference

    def _make_engine(self) -> Engine:
        e = self._config.rollout.engine
        reserved = 0
        if e.memory_fraction is not None and e.pages == "keep":
            self._display.phase("compile train, to know the memory it needs")
            reserved = self._step.update_bytes(self._buckets)
        sizes = EngineConfig(
            max_seqs=e.max_seqs,
            max_model_len=e.max_model_len,
            page_size=e.page_size,
            num_pages=e.num_pages,
            kv_memory=e.kv_memory,
            memory_fraction=e.memory_fraction,
            reserved_memory=reserved,
            chunk_tokens=e.chunk_tokens,
            decode_steps=e.decode_steps,
            prefix_cache=e.prefix_cache,
            seq_buckets=e.seq_buckets,
            token_buckets=e.token_buckets,
            prompt_logprobs=False,
        )
        return Engine(
            self._policy.cfg,
            self._state.params,
            self._config.numerics,
            sizes,
            tokenizer=self._policy.tokenizer,
            version=self._facts["updates"],
            warmup=False,
        )

    def _agree(self, allow_numerical_change: bool) -> None:
        """Trainer and engine exchange contracts; the run's own, if it has one, must allow to go on."""
        cfg, numerics = self._step.cfg, self._config.numerics
        where = {"devices": jax.device_count(), "processes": jax.process_count()}
        trainer = contracts.derive(
            cfg,
            numerics,
            self._step.traces(self._buckets[-1]),
            deployment=where | {"buckets": [dataclasses.asdict(b) for b in self._buckets]},
        )
        sizes = {k: v for k, v in dataclasses.asdict(self._engine.config).items() if v is not None}
        engine = contracts.derive(cfg, numerics, self._engine.traces(), deployment=where | {"engine": sizes})
        self._contract = contracts.agree(trainer, engine)
        if self._folder.resumed is not None:
            contracts.check(self._folder.resumed.contract, self._contract, allow_numerical_change)
        self._contract.save(self._folder.path / contracts.FILE)

    def _compile(self, has_reference: bool) -> None:
        start = time.perf_counter()
        score = has_reference or self._config.parity.check == "all"
        count = self._step.compile(
            self._buckets, score=score, progress=lambda name: self._display.phase(f"compile {name}")
        )
        self._display.phase("compile engine")
        count += self._engine.warmup(progress=False)
        self._display.note(f"compiled {count} programs in {time.perf_counter() - start:.1f} s")

    def _check_room(self) -> None:
        """Refuses now what would end the first update."""
        engine = self._engine.config
        released = self._config.rollout.engine.pages == "release"
        pages = engine.num_pages * engine.page_bytes(self._policy.cfg, self._config.numerics.dtype) if released else 0
        device_memory.require(
            self._step.update_bytes(self._buckets) - pages,
            "an update (gradients, activations of a microbatch, the new compute copy)",
            "set rollout.engine.pages=release or train.remat=true, or lower train.microbatch_tokens or rollout.engine.kv_memory",
        )

    def go(self, interrupts: Interrupts) -> RunResult:
        """Steps until the last one, or until a signal."""
        try:
            with interrupts.abandonable():
                self._evaluate_first()
            while self._done < self._config.train.steps:
                start = time.perf_counter()
                with interrupts.abandonable():
                    rollout = self._sampler.rollout(self._done + 1, self._display.phase)
                self._finish(rollout, start)
            self._save()
        except Interrupted:
            self._save()
            self._display.note(
                f"{interrupts.requested.name}: stopped after step {self._done}, which is saved; the same command goes on from it"
            )
            return self.result(interrupts.requested)
        except BaseException as e:
            self._rescue(e)
            raise
        return self.result()

    def _finish(self, rollout, start: float) -> None:
        """Trains on a step's rollout, hands over the weights, writes everything down."""
        c, step = self._config, self._done + 1
        if c.rollout.engine.pages == "release":
            self._engine.release_pages()
        updated = self._updater.update(
            self._state,
            rollout,
            step=step,
            version=self._facts["updates"],
            updates=self._facts["updates"],
            changing=self._set_changing,
            phase=self._display.phase,
        )
        self._state = updated.state
        self._facts["updates"] += updated.updates
        row = {"step": step, **rollout.metrics, **updated.metrics}
        sync = time.perf_counter()
        if updated.updates:
            self._engine.update_weights(self._state.params, self._facts["updates"])
        row["time/sync_s"] = time.perf_counter() - sync
        row["time/step_s"] = time.perf_counter() - start
        if c.eval.every and (step % c.eval.every == 0 or step == c.train.steps):
            row |= self._evaluate(step)
        self._writer.write_samples(step, rollout.samples)
        self._writer.write(row)
        self._done, self._changing, self._last_row = step, False, row
        self._display.step(row)
        if c.checkpoint.every and step % c.checkpoint.every == 0:
            self._save()

    def _set_changing(self) -> None:
        self._changing = True

    def _evaluate_first(self) -> None:
        """Before step 1; a run that was killed before its first checkpoint finds its row, and does not repeat it."""
        done = self._folder.evaluated_at(self._done)
        if self._config.eval.every and self._done == 0 and not done:
            self._evaluate(0)

    def _evaluate(self, step: int) -> dict[str, float]:
        self._display.phase("evaluate")
        metrics = self._evaluation()
        self._folder.add_evaluation({"step": step, **metrics})
        self._display.note(f"held-out reward after step {step}: {metrics['eval/reward_mean']:.3f}")
        return metrics

    def _save(self) -> None:
        """Saves the last finished step, unless it is saved."""
        if self._done == self._saved:
            return
        self._display.phase("save")
        state = {"masters": self._state.masters, "optimizer": self._state.optimizer}
        self._folder.store.save(self._done, state, self._facts, self._contract)
        self._saved = self._done

    def _rescue(self, error: BaseException) -> None:
        """Saves what is finished before an error goes up, where the weights are still those of the last finished step."""
        if self._changing or self._done == self._saved:
            kept = self._saved
        else:
            try:
                self._save()
                kept = self._done
            except (CheckpointError, OSError) as e:
                kept = self._saved
                error.add_note(f"step {self._done} could not be saved either: {e}")
        error.add_note(f"{self._folder.path} is saved up to step {kept}")
        self._display.note(f"stopped by an error; {self._folder.path} is saved up to step {kept}")


def _buckets(c: TrainConfig) -> tuple[Bucket, ...]:
    """One shape of microbatch: a second would compile twice as long, and packing fills all but the last one."""
    return make_buckets(
        [c.train.microbatch_tokens],
        sequences=min(c.rollout.sequences_per_step // c.train.minibatches, MOST_SEQUENCES),
        max_tokens=c.data.max_prompt_tokens + c.rollout.max_tokens,
        page_size=c.train.page_size,
    )
