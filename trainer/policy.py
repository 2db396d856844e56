"""Policy: the model that a run trains, from a folder, a name or an inline config; its tokenizer; its first weights."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import jax.numpy as jnp
import numpy as np

from isomodel import fetch, weights
from isomodel.config import ModelConfig
from isomodel.specs import Params, init_params
from isomodel.tokenizer import Tokenizer
from trainer.config import ModelSection


class PolicyError(ValueError):
    """A model and a tokenizer that do not go together."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is trained.

    Attributes:
      cfg: the model. tokenizer: its tokenizer.
      source: folder of the weights; None draws them at random.
      init_seed: seed of random weights.
    """

    cfg: ModelConfig
    tokenizer: Tokenizer
    source: pathlib.Path | None
    init_seed: int

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End tokens of the model's config, and the tokenizer's."""
        eos = self.tokenizer.eos_token_id
        return tuple(sorted({*self.cfg.eos_token_ids, *(() if eos is None else (eos,))}))

    def initial_weights(self) -> Params:
        """Weights before the first step, fp32.

        Raises:
          weights.WeightsError: the folder's weights cannot be used.
        """
        if self.source is None:
            return init_params(self.cfg, self.init_seed)
        return weights.load(self.source, self.cfg, jnp.float32)


def open_policy(section: ModelSection) -> Policy:
    """Finds the model and its tokenizer; the weights are read later.

    Raises:
      fetch.FetchError: there is no such model.
      ConfigError: its config cannot be used (isomodel.config).
      TokenizerError: its tokenizer cannot be loaded.
      PolicyError: the tokenizer has more ids than the model.
    """
    source = None if section.path is None else fetch.resolve(section.path)
    cfg = ModelConfig.from_hf(section.config, source="model.config") if source is None else ModelConfig.load(source)
    tokenizer = Tokenizer(source if section.tokenizer is None else section.tokenizer)
    if len(tokenizer) > cfg.vocab_size:
        raise PolicyError(
            f"the tokenizer {tokenizer.folder} has {len(tokenizer)} ids, and the model a vocabulary of {cfg.vocab_size}"
        )
    return Policy(cfg, tokenizer, source, section.init_seed)


def fingerprint(params: Params) -> str:
    """SHA-256 over every weight's name and bytes."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(params[name]).view(np.uint8))
    return digest.hexdigest()
