"""TrainStep: forward, backward and optimizer step, compiled ahead for the buckets of a run.

One forward serves three purposes: its activations feed the backward, its log-probabilities the loss, and the same numbers
the gate, which looks at them before the optimizer runs. Gradients go to the fp32 masters and add up in fp32 over the
microbatches of a minibatch; the compute copy that trainer and engine read is made once an optimizer step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from isomodel import model
from isomodel.batch import Batch
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import Params, cast_params, weight_specs
from trainer import loss
from trainer.config import ObjectiveSection, OptimizerSection
from trainer.optimizer import make_optimizer, schedule
from trainer.packing import Bucket, MicroBatch, Packed


class NonFiniteGradient(RuntimeError):
    """The gradient has a NaN or an infinity; nothing was updated."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that an optimizer step reads and changes.

    Attributes:
      masters: fp32 weights.
      optimizer: optax's state, fp32.
      params: the masters in the compute dtype, one rounding each: what every forward reads, the engine's too.
    """

    masters: Params
    optimizer: optax.OptState
    params: Params


class TrainStep:
    """The compiled programs of a run; holds no weights.

    A minibatch is `zero_gradients`, `accumulate` for each microbatch, then (after the gate) `apply`.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        numerics: Numerics,
        objective: ObjectiveSection,
        optimizer: OptimizerSection,
        *,
        remat: bool | str = False,
    ):
        """`remat`: as in model.forward."""
        self.cfg, self.numerics, self.objective, self.remat = cfg, numerics, objective, remat
        self._optimizer = _Optimizer(cfg, numerics.dtype, optimizer)
        self._schedule = schedule(optimizer)

    def init(self, masters: Params) -> TrainState:
        """State before the first optimizer step; `masters` in fp32 are copied."""
        return jax.jit(self._optimizer.initial)(masters)

    def restore(self, masters: Params, optimizer: optax.OptState) -> TrainState:
        """State out of what a checkpoint keeps: the compute copy is made again, by the same rounding."""
        return TrainState(masters, optimizer, jax.jit(functools.partial(cast_params, dtype=self.numerics.dtype))(masters))

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state."""
        return self._optimizer.abstract_state()

    def zero_gradients(self, state: TrainState) -> Params:
        """fp32 zeros, to accumulate into."""
        zeros, _, _ = _optimizer_programs(self._optimizer)
        return zeros(state.masters)

    def accumulate(
        self, state: TrainState, gradients: Params, packed: Packed, ref_logprobs_T: jax.Array | None = None
    ) -> tuple[Params, jax.Array, loss.Stats]:
        """Forward and backward of one microbatch.

        Args:
          gradients: the sum so far; its memory is taken.
          ref_logprobs_T: the reference's log-probabilities of the rows, when the objective has a KL.

        Returns:
          (the sum with this microbatch's gradient, the forward's log-probability of each row fp32 [T], statistics).
        """
        run = _compiled(self._train(packed.bucket))
        return run(gradients, state.masters, state.params, packed.micro, ref_logprobs_T, model.rope(self.cfg, self.numerics))

    def score(self, params: Params, packed: Packed) -> jax.Array:
        """Log-probability of each row of a microbatch under `params`, fp32 [T]; forward only."""
        return _compiled(self._scoring(packed.bucket))(params, packed.micro, model.rope(self.cfg, self.numerics))

    def apply(self, state: TrainState, gradients: Params, updates: int) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step. Takes the memory of the state's masters and optimizer, and of the gradients.

        Args:
          gradients: of the whole minibatch.
          updates: optimizer steps made before this one, for the report of the learning rate.

        Returns:
          (new state, {"grad_norm": before clipping, "lr"}).

        Raises:
          NonFiniteGradient: nothing was updated, the state is as it was.
        """
        _, norm, run = _optimizer_programs(self._optimizer)
        grad_norm = float(norm(gradients))
        if not np.isfinite(grad_norm):
            bad = [name for name, g in gradients.items() if not bool(jnp.isfinite(g).all())]
            raise NonFiniteGradient(
                f"the gradient's norm is {grad_norm}; weights with a NaN or an infinity: {', '.join(bad) or 'none (the sum '
                'of squares overflows)'}. Nothing was updated; a lower learning rate or a KL term may help"
            )
        masters, optimizer, params = run(state.masters, state.optimizer, gradients)
        return TrainState(masters, optimizer, params), {"grad_norm": grad_norm, "lr": float(self._schedule(updates))}

    def compile(self, buckets: Sequence[Bucket], *, score: bool, progress: Callable[[str], None] = lambda name: None) -> int:
        """Compiles the optimizer step, and forward and backward (and scoring, where asked for) of every bucket; returns how
        many programs that is.

        `progress` is called with each program's name before it is compiled.
        """
        todo = [("train", self._train(b)) for b in buckets]
        if score:
            todo += [("score", self._scoring(b)) for b in buckets]
        for name, program in todo:
            progress(f"{name} {program.bucket.rows} x {program.bucket.sequences}")
            _compiled(program)
        progress("optimizer")
        _optimizer_programs(self._optimizer)
        return len(todo) + 1

    def update_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Device memory that an update takes beside the state: gradients, activations, the new compute copy. Compiles."""
        zeros, norm, apply = _optimizer_programs(self._optimizer)
        programs = [*(_compiled(self._train(b)) for b in buckets), norm, apply]
        found = [p.memory_analysis() for p in programs]
        most = max(m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes for m in found)
        return zeros.memory_analysis().output_size_in_bytes + most

    def traces(self, bucket: Bucket) -> Mapping[str, Callable[[], Any]]:
        """{case: function that traces what this trainer runs in it}, for `contract.derive`."""
        return {"remat" if self.remat else "train": self._train(bucket).trace, "score": self._scoring(bucket).trace}

    def _train(self, bucket: Bucket) -> _Train:
        o = self.objective
        return _Train(self.cfg, self.numerics, bucket, self.remat, o.ratio, o.clip_low, o.clip_high, o.kl_coef)

    def _scoring(self, bucket: Bucket) -> _Score:
        return _Score(self.cfg, self.numerics, bucket)


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """AdamW on the masters; everything that its programs depend on."""

    cfg: ModelConfig
    dtype: jnp.dtype
    section: OptimizerSection

    def initial(self, masters: Params) -> TrainState:
        masters = {name: w.astype(jnp.float32) for name, w in masters.items()}
        return TrainState(masters, make_optimizer(self.section, self.cfg).init(masters), cast_params(masters, self.dtype))

    def updated(self, masters: Params, optimizer: optax.OptState, gradients: Params):
        changes, optimizer = make_optimizer(self.section, self.cfg).update(gradients, optimizer, masters)
        masters = optax.apply_updates(masters, changes)
        return masters, optimizer, cast_params(masters, self.dtype)

    def abstract_state(self) -> TrainState:
        return jax.eval_shape(self.initial, _abstract_weights(self.cfg, jnp.float32))


@functools.cache
def _optimizer_programs(optimizer: _Optimizer) -> tuple[Callable, Callable, Callable]:
    """(zeros like the masters, norm of a gradient, optimizer step), compiled once a process."""
    state = optimizer.abstract_state()
    zeros = jax.jit(functools.partial(jax.tree.map, jnp.zeros_like)).lower(state.masters)
    norm = jax.jit(optax.tree.norm).lower(state.masters)
    # Old masters, moments and gradients give their memory to the new ones. The old compute copy stays: the engine reads
    # it until it is given the new one.
    apply = jax.jit(optimizer.updated, donate_argnums=(0, 1, 2)).lower(state.masters, state.optimizer, state.masters)
    return zeros.compile(), norm.compile(), apply.compile()


@dataclasses.dataclass(frozen=True)
class _Score:
    """Log-probability of each row of a microbatch; everything that its program depends on."""

    cfg: ModelConfig
    numerics: Numerics
    bucket: Bucket

    def logprobs(
        self, params: Params, micro: MicroBatch, rope: jax.Array, masters: Params | None = None, remat: bool | str = False
    ) -> jax.Array:
        pages = self.bucket.train_pages
        hidden_TD, _ = model.forward(
            self.cfg, self.numerics, params, micro.batch, pages, masters=masters, remat=remat, rope=rope
        )
        return model.logprobs(
            self.cfg, self.numerics, params, hidden_TD, micro.targets_T, micro.inv_temp_T, masters=masters
        )

    def weights(self, dtype) -> dict[str, jax.ShapeDtypeStruct]:
        return _abstract_weights(self.cfg, dtype)

    def trace(self):
        """jax.stages.Traced of the program."""
        rope = model.abstract_rope(self.cfg, self.numerics)
        return jax.jit(self.logprobs).trace(self.weights(self.numerics.dtype), abstract_micro(self.bucket), rope)


@dataclasses.dataclass(frozen=True)
class _Train(_Score):
    """Forward, loss and backward of a microbatch, added to the gradients so far."""

    remat: bool | str
    ratio: str
    clip_low: float
    clip_high: float
    kl_coef: float

    def accumulate(self, gradients, masters, params, micro: MicroBatch, ref_logprobs_T, rope):
        def objective(masters):
            logprobs_T = self.logprobs(params, micro, rope, masters, self.remat)
            value, stats = loss.policy_loss(
                logprobs_T,
                micro,
                ratio=self.ratio,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                kl_coef=self.kl_coef,
                ref_logprobs_T=ref_logprobs_T,
            )
            return value, (logprobs_T, stats)

        new, (logprobs_T, stats) = jax.grad(objective, has_aux=True)(masters)
        return jax.tree.map(jnp.add, gradients, new), logprobs_T, stats

    def trace(self):
        masters, params = self.weights(jnp.float32), self.weights(self.numerics.dtype)
        ref_T = jax.ShapeDtypeStruct((self.bucket.rows,), jnp.float32) if self.kl_coef else None
        run = jax.jit(self.accumulate, donate_argnums=0)
        rope = model.abstract_rope(self.cfg, self.numerics)
        return run.trace(masters, masters, params, abstract_micro(self.bucket), ref_T, rope)


@functools.cache
def _compiled(program: _Score) -> Callable:
    """Compiles once a process: runs of equal shapes share their programs."""
    return program.trace().lower().compile()


def _abstract_weights(cfg: ModelConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in weight_specs(cfg).items()}


def abstract_micro(bucket: Bucket) -> MicroBatch:
    """Shapes and dtypes of a microbatch in a bucket."""
    T, S, P = bucket.rows, bucket.sequences, bucket.pages
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    batch = Batch(i32((T,)), i32((T,)), i32((T,)), i32((S + 1,)), i32((S,)), i32((S, P)))
    mask_T = jax.ShapeDtypeStruct((T,), jnp.bool_)
    return MicroBatch(batch, i32((T,)), mask_T, f32((T,)), f32((T,)), f32((T,)), f32((T,)), i32((T,)))
