"""TrainConfig: everything a training run is told, read from YAML, with every default written out.

Where a default depends on another field (the objective's kind, the numerics, the response length) the field's own
default is None and `__post_init__` fills it in, so that what a run reads, and saves as its config.yaml, has no None left
but where None means "off".
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from isomodel import yaml_config
from isomodel.numerics import Numerics
from isomodel.yaml_config import ConfigError, check
from trainer.config_fields import (
    Finite,
    Natural,
    NonNegative,
    PageSize,
    Positive,
    PositiveFloat,
    Seed,
    Share,
    fill,
    section,
)
from trainer.objective_config import OBJECTIVES, DynamicSampling, ObjectiveSection, Overlong


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """What is trained: a folder or Hub id (`path`), or random weights of an inline Hugging Face config (`config`).

    Attributes:
      path: a Hugging Face folder, a Hub id, or a name that `isomodel fetch` knows ("smollm2").
      config: the keys of a config.json; weights are drawn from `init_seed`. Needs `tokenizer`.
      tokenizer: folder of the tokenizer; None takes the one in `path`.
      init_seed: seed of random weights; used with `config` only.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    init_seed: Seed = 0

    def __post_init__(self):
        faults = []
        if (self.path is None) == (self.config is None):
            faults.append("path: set either path (a model folder) or config (random weights), and not both")
        if self.config is not None and self.tokenizer is None:
            faults.append("tokenizer: random weights (config) bring no tokenizer; name a tokenizer folder")
        check(faults)


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Where prompts come from.

    Attributes:
      source: "reasoning_gym:TASK", "task:NAME" (trainer.tasks), or the path of a .jsonl or .parquet file.
      params: parameters of the task.
      size: items that a task generates, held-out ones included; None reads a whole file (tasks: 1000).
      prompt: name of the field with the prompt text.
      messages: name of the field with chat messages; read where a row has no prompt field.
      answer: name of the field with the answer, if rows have one.
      system_prompt: system message put before every prompt.
      chat_template: prompts go through the tokenizer's chat template; False encodes the text alone.
      template_args: arguments of the chat template, such as {enable_thinking: false} for Qwen3.
      max_prompt_tokens: longest prompt, in tokens.
      long_prompts: "refuse" stops with the list of too long prompts; "drop" leaves them out and says how many.
      shuffle: False keeps the source's order, epoch after epoch.
      seed: seed of generation, order and split; None takes the run's.
      held_out: items kept out of training for evaluation; no prompt text is in both parts.
    """

    source: str
    params: dict[str, Any] = field(default_factory=dict)
    size: Positive | None = None
    prompt: str = "prompt"
    messages: str = "messages"
    answer: str = "answer"
    system_prompt: str | None = None
    chat_template: bool = True
    template_args: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: Positive = 512
    long_prompts: Literal["refuse", "drop"] = "refuse"
    shuffle: bool = True
    seed: Seed | None = None
    held_out: Natural = 0

    def __post_init__(self):
        faults = []
        if not self.chat_template and self.template_args:
            faults.append("template_args: has no use without the chat template (chat_template: false)")
        if self.size is not None and self.held_out >= self.size:
            faults.append(f"held_out: {self.held_out} leaves nothing to train on of size {self.size}")
        check(faults)


@dataclasses.dataclass(frozen=True)
class RewardTerm:
    """One reward function and its weight in the sum.

    Attributes:
      kind: "task" (the task's own verifier), "math_verify", "exact", or "module:function".
      weight: factor in the sum of terms.
      args: keyword arguments handed to the function.
    """

    kind: Annotated[str, Field(min_length=1)]
    weight: Finite = 1.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RewardSection:
    """How completions are judged.

    Attributes:
      kind, weight, args: the first term, see RewardTerm.
      extract: what of a completion is judged: "text" (all, stripped), "tag" (the last <answer>..</answer>), "boxed" (the
        last \\boxed{..}), "number" (the last number), "line" (the last line that is not blank).
      terms: further terms that are added; each is logged as reward/KIND.
      workers: processes that judge; 0 judges in the trainer's own process, without a time limit.
      timeout_s: seconds that one completion may take, all terms together (with workers).
      on_timeout: "zero" gives that completion 0, "stop" ends the run.
      on_error: what a function that raises, or returns no finite number, does: "stop" or "zero".
    """

    kind: Annotated[str, Field(min_length=1)] = "task"
    weight: Finite = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    extract: Literal["text", "tag", "boxed", "number", "line"] = "text"
    terms: tuple[RewardTerm, ...] = ()
    workers: Natural = 0
    timeout_s: PositiveFloat = 30.0
    on_timeout: Literal["zero", "stop"] = "zero"
    on_error: Literal["zero", "stop"] = "stop"

    @property
    def all_terms(self) -> tuple[RewardTerm, ...]:
        """Every term, the first one included."""
        return (RewardTerm(self.kind, self.weight, self.args), *self.terms)


@dataclasses.dataclass(frozen=True)
class EngineSection:
    """Sizes of the rollout engine, as in isomodel.rollout's EngineConfig; none reaches the bits.

    Attributes:
      max_seqs: sequences that decode together.
      page_size: tokens in a page of the KV cache; a divisor of 128.
      num_pages: pages of the KV cache; None: from kv_memory.
      kv_memory: bytes of the KV cache; None: room for max_seqs longest sequences, at most 1 GiB.
      memory_fraction: in place of kv_memory: the KV cache takes what is left of this share of the device memory that JAX may
        take, after weights, optimizer state, the engine's scratch and, with pages "keep", all that an update needs.
      pages: of the KV cache, while the trainer updates: "keep" them, or "release" their memory to it and take it again for
        the next rollout. Released keys and values would be of old weights; nothing compiles, and no bit differs.
      chunk_tokens: prompt tokens of one forward, at most; None: 4096 on a GPU, 512 on a CPU.
      decode_steps: most tokens that the device samples between two looks by the host; None: 64 on a GPU, 8 on a CPU.
      max_model_len: longest sequence, prompt and response; None: data.max_prompt_tokens + rollout.max_tokens.
      prefix_cache: share pages of equal prefixes between requests.
      seq_buckets, token_buckets: sizes that steps are padded to, rising; each is compiled. None: by factors of four. Fewer
        start faster; more waste less where few sequences run.
    """

    max_seqs: Positive = 64
    page_size: PageSize = 16
    num_pages: Positive | None = None
    kv_memory: Positive | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    pages: Literal["keep", "release"] = "keep"
    chunk_tokens: Positive | None = None
    decode_steps: Positive | None = None
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    prefix_cache: bool = True
    seq_buckets: tuple[Positive, ...] | None = None
    token_buckets: tuple[Positive, ...] | None = None

    def __post_init__(self):
        faults = []
        sizes = [n for n in ("num_pages", "kv_memory", "memory_fraction") if getattr(self, n) is not None]
        if len(sizes) > 1:
            faults.append(f"{sizes[0]}: {' and '.join(sizes[1:])} is set too; set one of them")
        for name in ("seq_buckets", "token_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes))):
                faults.append(f"{name}: {list(sizes)} must be sizes in rising order")
        check(faults)


@dataclasses.dataclass(frozen=True)
class RolloutSection:
    """How responses are sampled.

    Attributes:
      prompts_per_step: prompts (groups) of one step.
      samples_per_prompt: responses of one prompt, the group that advantages compare.
      max_tokens: longest response, in tokens.
      temperature: > 0; also the temperature of every log-probability.
      top_k, top_p, min_p: truncation of what may be sampled (0, 1 and 0 are off). Log-probabilities are always those of
        the whole distribution, so truncation is off-policy by its nature.
      stop: strings that end a response, besides the model's end tokens.
      engine: sizes of the engine.
    """

    prompts_per_step: Positive = 8
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    max_tokens: Positive = 256
    temperature: PositiveFloat = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    engine: EngineSection = section(EngineSection)

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW, its schedule, and clipping by the global norm.

    Attributes:
      lr: peak learning rate; 0 is allowed (a parity run).
      betas, eps, weight_decay: AdamW's. Decay is decoupled and skips norms and other vectors.
      warmup_steps: optimizer steps of linear warm-up from 0.
      schedule: after warm-up, "constant", "linear" or "cosine", down to min_lr at `total_steps`.
      min_lr: end of the schedule.
      total_steps: optimizer steps of the whole schedule; None: train.steps * train.epochs * train.minibatches. A
        constant schedule has no end and stays None, so that a run can be continued for more steps.
      max_grad_norm: global norm that gradients are clipped to; None is off.
    """

    lr: NonNegative = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Natural = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegative = 0.0
    total_steps: Positive | None = None
    max_grad_norm: PositiveFloat | None = 1.0

    def __post_init__(self):
        if self.min_lr > self.lr:
            check([f"min_lr: {self.min_lr} is above lr {self.lr}"])


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """How a step trains on its rollouts.

    Attributes:
      steps: rollout steps of the run.
      minibatches: optimizer steps made of one pass over a step's responses.
      epochs: passes over a step's responses.
      microbatch_tokens: token rows of one forward and backward; responses are packed into it. Does not reach the
        forward's bits.
      remat: recompute each layer in the backward instead of keeping its activations. "save_attention" keeps attention's output
        and log-sum-exp, and recomputes the rest: for long sequences (iso numerics; native has nothing to keep apart).
      page_size: tokens in a page of the training forward's keys and values; a divisor of 128.
    """

    steps: Positive = 100
    minibatches: Positive = 1
    epochs: Positive = 1
    microbatch_tokens: Positive = 4096
    remat: bool | Literal["save_attention"] = True
    page_size: PageSize = 16


@dataclasses.dataclass(frozen=True)
class ParitySection:
    """The gate between rollout and trainer log-probabilities, compared as integers.

    Attributes:
      check: "first": tokens whose training forward runs under the rollout's weights (the first minibatch; free);
        "all": the rest is scored too before the first update; "off": native numerics only.
      on_mismatch: "stop" or "record" the difference as a metric. None: stop under iso, record under native.
    """

    check: Literal["first", "all", "off"] = "first"
    on_mismatch: Literal["stop", "record"] | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """When the run is saved, and whether it is continued.

    Attributes:
      every: steps between checkpoints; 0 saves at the end only.
      keep: newest checkpoints kept.
      resume: "auto" continues a run that the folder holds, "never" refuses a folder that holds one, "must" needs one.
    """

    every: Natural = 10
    keep: Positive = 2
    resume: Literal["auto", "never", "must"] = "auto"


@dataclasses.dataclass(frozen=True)
class EvalSection:
    """Evaluation on held-out prompts.

    Attributes:
      every: steps between evaluations; 0 is off. The first is before step 1, the last after the last step.
      prompts: held-out prompts used; None: all.
      samples: responses of one prompt.
      temperature: 0 is greedy.
    """

    every: Natural = 0
    prompts: Positive | None = None
    samples: Positive = 1
    temperature: NonNegative = 0.0


@dataclasses.dataclass(frozen=True)
class LogSection:
    """What is written besides metrics.jsonl, which has every step.

    Attributes:
      every: steps between lines of the progress display.
      samples: responses of a step written to samples/; 0 is off, None: all.
      samples_every: steps between sample dumps.
      tensorboard: write TensorBoard events.
      wandb: project name of Weights & Biases; None is off.
    """

    every: Positive = 1
    samples: Natural | None = 4
    samples_every: Positive = 10
    tensorboard: bool = True
    wandb: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run; see each section.

    Attributes:
      name: of the run; its folder is run_dir/name.
      seed: of everything drawn at random that has no seed of its own.
      run_dir: folder of all runs.
    """

    model: ModelSection
    data: DataSection
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: Seed = 0
    run_dir: str = "runs"
    numerics: Numerics = section(Numerics, "mode")
    reward: RewardSection = section(RewardSection, "kind")
    rollout: RolloutSection = section(RolloutSection)
    objective: ObjectiveSection = section(ObjectiveSection, "kind")
    optimizer: OptimizerSection = section(OptimizerSection)
    train: TrainSection = section(TrainSection)
    parity: ParitySection = section(ParitySection, "check")
    checkpoint: CheckpointSection = section(CheckpointSection)
    eval: EvalSection = section(EvalSection)
    log: LogSection = section(LogSection)

    def __post_init__(self):
        longest = self.data.max_prompt_tokens + self.rollout.max_tokens
        fill(self, "data.seed", self.seed)
        fill(self, "rollout.engine.max_model_len", longest)
        fill(self, "objective.constant", self.rollout.max_tokens)
        fill(self, "objective.overlong.buffer", self.rollout.max_tokens // 5 if self.objective.kind == "dapo" else 0)
        if self.optimizer.schedule != "constant":
            fill(self, "optimizer.total_steps", self.optimizer_steps)
        fill(self, "parity.on_mismatch", "stop" if self.numerics.mode == "iso" else "record")
        check(self._faults(longest))

    def _faults(self, longest: int) -> Iterable[str]:
        rollout, data, train, engine = self.rollout, self.data, self.train, self.rollout.engine
        if rollout.sequences_per_step % train.minibatches:
            yield (
                f"train.minibatches: {train.minibatches} does not divide the {rollout.sequences_per_step} responses of a step"
                f" (rollout.prompts_per_step {rollout.prompts_per_step} * samples_per_prompt {rollout.samples_per_prompt})"
            )
        if longest > engine.max_model_len:
            yield (
                f"rollout.engine.max_model_len: {engine.max_model_len} is shorter than data.max_prompt_tokens"
                f" {data.max_prompt_tokens} + rollout.max_tokens {rollout.max_tokens} = {longest}"
            )
        pages = -(-(engine.max_model_len - 1) // engine.page_size)  # the last token's keys and values are never read
        if engine.num_pages is not None and engine.num_pages < pages:
            yield (
                f"rollout.engine.num_pages: {engine.num_pages} pages of {engine.page_size} tokens do not hold one sequence of"
                f" max_model_len {engine.max_model_len}, which needs {pages}"
            )
        if longest > train.microbatch_tokens:
            yield (
                f"train.microbatch_tokens: {train.microbatch_tokens} does not hold one longest sequence:"
                f" data.max_prompt_tokens {data.max_prompt_tokens} + rollout.max_tokens {rollout.max_tokens} = {longest}"
            )
        scheduled = self.optimizer.total_steps or self.optimizer_steps
        if self.optimizer.warmup_steps > scheduled:
            yield f"optimizer.warmup_steps: {self.optimizer.warmup_steps} is more than the {scheduled} optimizer steps of the run"
        if self.objective.overlong.buffer > rollout.max_tokens:
            yield f"objective.overlong.buffer: {self.objective.overlong.buffer} is more than rollout.max_tokens {rollout.max_tokens}"
        if self.numerics.mode == "iso" and self.parity.check == "off":
            yield "parity.check: off is for numerics=native; under iso every step is checked (first or all)"
        if self.numerics.mode == "iso" and self.parity.on_mismatch == "record":
            yield "parity.on_mismatch: record is for numerics=native; under iso one differing bit stops the run"
        if self.eval.every and not data.held_out:
            yield "eval.every: evaluation needs held-out prompts; set data.held_out (or eval.every=0)"
        if self.eval.every and self.eval.temperature == 0 and self.eval.samples > 1:
            yield f"eval.samples: {self.eval.samples} greedy samples of one prompt are all equal; set eval.temperature above 0"

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, when no step is skipped."""
        return self.train.steps * self.train.epochs * self.train.minibatches

    @property
    def run_folder(self) -> pathlib.Path:
        return pathlib.Path(self.run_dir) / self.name

    @classmethod
    def load(cls, path: str | pathlib.Path, overrides: Iterable[str] = ()) -> TrainConfig:
        """From a YAML file and "key=value" overrides.

        Raises:
          ConfigError: lists every fault.
        """
        return yaml_config.load(cls, path, overrides)

    def to_yaml(self) -> str:
        """YAML with every default written out, which `load` turns into an equal TrainConfig."""
        return yaml_config.dump(self)


__all__ = ["OBJECTIVES", "ConfigError", "DynamicSampling", "ObjectiveSection", "Overlong", "TrainConfig"]
