"""Export: a run's trained weights as a Hugging Face folder."""

from __future__ import annotations

import pathlib

from isomodel import weights
from trainer.checkpoint import Checkpoint, CheckpointStore, load_arrays
from trainer.config import TrainConfig
from trainer.policy import open_policy
from trainer.run_folder import CONFIG, RunError
from trainer.step import TrainStep


def export(
    run: pathlib.Path, target: pathlib.Path, *, step: int | None = None, dtype: str | None = None, overwrite: bool = False
) -> Checkpoint:
    """Writes config, weights and tokenizer of a run's checkpoint; whole or not at all. Returns the checkpoint.

    Args:
      run: its folder.
      step: which checkpoint; None: the newest intact one.
      dtype: "bfloat16" or "float32"; None: the run's compute dtype, which is what it sampled and was evaluated with.
      overwrite: replace a model folder that is there.

    Raises:
      RunError: no run, or no intact checkpoint of that step.
      And what the model, its tokenizer and `weights.save` raise.
    """
    run = pathlib.Path(run)
    if not (run / CONFIG).is_file():
        raise RunError(f"{run} is no run folder: it has no {CONFIG}")
    config = TrainConfig.load(run / CONFIG)
    store = CheckpointStore(run / "checkpoints", config.checkpoint.keep)
    found, torn = store.latest() if step is None else store.at(step)
    if found is None:
        listed = "".join(f"\n  step {s} is torn: {reason}" for s, reason in torn.items())
        raise RunError(
            f"{run} has no checkpoint{'' if step is None else f' of step {step}'} to export; "
            f"there are: {', '.join(map(str, store.steps())) or 'none'}{listed}"
        )
    policy = open_policy(config.model)
    abstract = TrainStep(policy.cfg, config.numerics, config.objective, config.optimizer).abstract_state()
    arrays = load_arrays(found, {"masters": abstract.masters, "optimizer": abstract.optimizer})
    weights.save(
        target,
        policy.cfg,
        arrays["masters"],
        dtype=dtype or config.numerics.compute_dtype,
        tokenizer=policy.tokenizer.folder,
        overwrite=overwrite,
    )
    return found
