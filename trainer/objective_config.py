"""ObjectiveSection: what is optimised, with the published objectives as defaults."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from isomodel.yaml_config import check
from trainer.config_fields import Natural, NonNegative, Positive, PositiveFloat, fill, section


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups whose rewards are all equal carry no gradient.

    Attributes:
      enabled: leave such groups out and sample more prompts in their place; None: as the objective's kind has it.
      max_rounds: sampling rounds of one step at most, the first included; then the step takes the groups it has.
    """

    enabled: bool | None = None
    max_rounds: Positive = 4


@dataclasses.dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): in the last `buffer` tokens below max_tokens the
    reward falls linearly, by `penalty` at max_tokens.

    Attributes:
      buffer: tokens; 0 is off; None: a fifth of max_tokens for dapo (the paper's 4096 of 20480), else off.
      penalty: reward taken away at full length.
      mask: leave responses that hit max_tokens out of the loss (overlong filtering).
    """

    buffer: Natural | None = None
    penalty: NonNegative = 1.0
    mask: bool = False


OBJECTIVES: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, equation 3 (its beta of 0.04 is left to kl_coef).
    "grpo": dict(clip_low=0.2, clip_high=0.2, aggregation="sequence", normalize_std=True, ratio="token", dynamic=False),
    # "Understanding R1-Zero-like training", arXiv 2503.20783: no std, one constant in place of each length.
    "dr_grpo": dict(
        clip_low=0.2, clip_high=0.2, aggregation="constant", normalize_std=False, ratio="token", dynamic=False
    ),
    # DAPO, arXiv 2503.14476.
    "dapo": dict(clip_low=0.2, clip_high=0.28, aggregation="token", normalize_std=True, ratio="token", dynamic=True),
    # GSPO, arXiv 2507.18071, section 5.1: one ratio a sequence, hence the narrow clip.
    "gspo": dict(
        clip_low=3e-4, clip_high=4e-4, aggregation="sequence", normalize_std=True, ratio="sequence", dynamic=False
    ),
}


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """What is optimised. None: as `kind` has it, see OBJECTIVES.

    Attributes:
      kind: grpo, dr_grpo, dapo or gspo.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      aggregation: "sequence" (mean over a response's tokens, then over responses), "token" (mean over all tokens of the
        minibatch), "constant" (sum over tokens / `constant`, then mean over responses).
      constant: tokens, the divisor of "constant"; None: rollout.max_tokens.
      normalize_std: divide advantages by the group's standard deviation.
      ratio: "token", or "sequence" (GSPO's geometric mean over the response).
      kl_coef: weight of the KL term against the reference; 0 needs no reference.
      reference: "initial" (the weights that the run starts from) or a model folder.
      dynamic_sampling: see DynamicSampling.
      overlong: see Overlong.
    """

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_high: PositiveFloat | None = None
    aggregation: Literal["sequence", "token", "constant"] | None = None
    constant: Positive | None = None
    normalize_std: bool | None = None
    ratio: Literal["token", "sequence"] | None = None
    kl_coef: NonNegative = 0.0
    reference: str = "initial"
    dynamic_sampling: DynamicSampling = section(DynamicSampling, "enabled")
    overlong: Overlong = section(Overlong)

    def __post_init__(self):
        defaults = OBJECTIVES[self.kind]
        for name in ("clip_low", "clip_high", "aggregation", "normalize_std", "ratio"):
            fill(self, name, defaults[name])
        fill(self, "dynamic_sampling.enabled", defaults["dynamic"])
        if self.ratio == "sequence" and self.aggregation != "sequence":
            check(
                [
                    f"aggregation: a ratio a sequence (ratio: sequence) needs aggregation sequence, not {self.aggregation}"
                ]
            )
