"""AdamW, its schedule and clipping, by optax, from the run's config."""

from __future__ import annotations

import optax

from isomodel.config import ModelConfig
from isomodel.specs import weight_specs
from trainer.config import OptimizerSection


def schedule(section: OptimizerSection) -> optax.Schedule:
    """Learning rate of an optimizer step by how many came before it (0 for the first).

    Warm-up is linear from 0 and the first step already moves: step u of w has lr * u / w. The schedule then falls to
    min_lr at step `total_steps`, the last one, and stays there.
    """
    lr, w = section.lr, section.warmup_steps
    if section.schedule == "constant":
        after = optax.constant_schedule(lr)
    elif section.schedule == "linear":
        after = optax.linear_schedule(lr, section.min_lr, max(1, section.total_steps - w))
    else:
        rest = max(1, section.total_steps - w)
        after = optax.cosine_decay_schedule(lr, rest, alpha=section.min_lr / lr if lr else 0.0)
    joined = optax.join_schedules([optax.linear_schedule(0.0, lr, w), after], [w]) if w else after
    return lambda count: joined(count + 1)


def make_optimizer(section: OptimizerSection, cfg: ModelConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101); state in fp32.

    Weight decay leaves out what is a vector in each layer (norms): shrinking a gain towards 0 regularises nothing.
    """
    decayed = {name: sum(axis != "layers" for axis in spec.axes) >= 2 for name, spec in weight_specs(cfg).items()}
    adamw = optax.adamw(
        schedule(section),
        b1=section.betas[0],
        b2=section.betas[1],
        eps=section.eps,
        weight_decay=section.weight_decay,
        mask=decayed,
        mu_dtype="float32",
    )
    if section.max_grad_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), adamw)
