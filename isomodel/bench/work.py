"""What a benchmark of rollouts runs: a model, prompts, how much is sampled; and what no engine can beat on it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from isomodel.config import ModelConfig

_QWEN3 = dict(
    family="qwen3",
    vocab_size=151936,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=40960,
    qk_norm=True,
)
SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-8b": ModelConfig(
        hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_embeddings=False, **_QWEN3
    ),
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_positions=8192,
        tie_embeddings=True,
        qk_norm=False,
    ),
}
"""Models that are run with random weights, by the name that stands for their shape."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Prompts, several samples of each, all asked for at once.

    Attributes:
      prompts: how many.
      samples: of each prompt.
      prompt_tokens: length of each prompt, of the longest of a file; random tokens, no two prompts alike.
      max_tokens: sampled for each; no stop token ends one.
      file: JSON list of prompts, each a list of token ids, instead of random ones; the model's end tokens end a sample then.
      logprobs: whether each token's log-probability is asked for.
      temperature: of all.
    """

    prompts: int = 256
    samples: int = 1
    prompt_tokens: int = 128
    max_tokens: int = 512
    logprobs: bool = True
    temperature: float = 1.0
    file: str | None = None

    def __post_init__(self):
        """Raises ValueError naming every field that is out of range."""
        faults = [
            f"{name}={getattr(self, name)} must be 1 or more"
            for name in ("prompts", "samples", "prompt_tokens", "max_tokens")
            if getattr(self, name) < 1
        ]
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            faults.append(f"temperature={self.temperature} must be 0 or more")
        if faults:
            raise ValueError("bench: " + "; ".join(faults))

    @property
    def sequences(self) -> int:
        """Samples that run side by side."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a finished sequence, its prompt's included."""
        return self.prompt_tokens + self.max_tokens

    def token_ids(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """The prompts: the same for every engine. A file's are the same for every seed, too."""
        if self.file is not None:
            return json.loads(Path(self.file).read_text())
        rng = np.random.default_rng(seed)
        return rng.integers(0, min(vocab_size, 150000), (self.prompts, self.prompt_tokens)).tolist()

    def floor_s(self, cfg: ModelConfig, bytes_per_s: float) -> float:
        """Seconds in which weights and keys and values of every decode step could be read, in bf16: no decode is faster.

        Args:
          cfg: the model.
          bytes_per_s: what a large copy on the device reads and writes.
        """
        return sum(self.step_bytes(cfg)) * self.max_tokens / bytes_per_s

    def step_bytes(self, cfg: ModelConfig) -> tuple[int, int]:
        """(bytes of weights, bytes of keys and values) that a decode step in the middle of the work reads, in bf16; a prompt's
        keys and values once for all its samples."""
        D, F, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
        layer = D * d * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 3 * D * F
        weights = 2 * (cfg.num_layers * layer + cfg.vocab_size * D)
        positions = self.prompts * self.prompt_tokens + self.sequences * (self.max_tokens // 2)
        return weights, 4 * cfg.num_layers * positions * cfg.num_kv_heads * d
