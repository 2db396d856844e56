"""SamplingParams: how a request is sampled, and the numbers that are derived from it once, on the host."""

from __future__ import annotations

import dataclasses
import math
import numbers

import numpy as np

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-3
"""Logits times 1 / temperature are rounded to float32: here to hundredths of a nat, at 1e-6 to whole ones, and from 1e-8 on
sums of their exponentials overflow: log-probabilities are no numbers then."""
MAX_TEMPERATURE = 1e30
"""Far below where 1 / temperature is no normal float32 any more."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the completions of one prompt are sampled.

    Attributes:
      temperature: logits are divided by it, at least MIN_TEMPERATURE; 0 is greedy (and log-probabilities are then at
        temperature 1).
      top_k: keep the k likeliest tokens; 0 is off.
      top_p: keep the likeliest tokens whose probabilities sum to top_p (nucleus sampling, Holtzman et al. 2020); 1 is
        off.
      min_p: keep tokens with at least min_p times the likeliest one's probability (Nguyen et al. 2024); 0 is off.
      seed: fixes the tokens, whatever else runs beside them; None: the engine assigns one and reports it.
      max_tokens: most tokens of one completion; None: up to the engine's max_model_len.
      stop: strings that end a completion; needs a tokenizer. A single string is one stop string.
      stop_token_ids: token ids that end a completion, besides the model's end-of-sequence ids.
      ignore_eos: the model's end-of-sequence ids end nothing.
      n: completions of the prompt; they share its pages.
      logprobs: return the log-probability of every sampled token.
      prompt_logprobs: return the log-probability of every prompt token but the first, at the same temperature. The
        prefix cache is not read for such a prompt.
      top_logprobs: return so many of the likeliest tokens at each sampled one, with their log-probabilities; 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = True
    prompt_logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self):
        """Raises ValueError listing every field that is out of range."""
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        faults = []

        def require(ok: bool, field: str, rule: str):
            if not ok:
                faults.append(f"{field}={getattr(self, field)!r} {rule}")

        def in_range(field: str, low: float, high: float) -> bool:
            value = getattr(self, field)
            return _is_real(value) and low <= value <= high

        require(_is_real(self.temperature) and self.temperature >= 0, "temperature", "must be a number >= 0")
        if not faults and self.temperature:
            rule = f"must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}: float32 cannot tell the rest"
            require(MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE, "temperature", rule)
        require(_is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", "must be an integer >= 0 (0 is off)")
        require(in_range("top_p", 0, 1) and self.top_p > 0, "top_p", "must be above 0 and at most 1 (1 is off)")
        require(in_range("min_p", 0, 1), "min_p", "must be between 0 and 1 (0 is off)")
        require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            "must be None or an integer from 0 to 2**64 - 1",
        )
        require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "must be None or an integer >= 1",
        )
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "must hold strings that are not empty")
        require(
            all(_is_int(t) and 0 <= t < 2**31 for t in self.stop_token_ids),
            "stop_token_ids",
            "must hold token ids, integers >= 0",
        )
        require(
            _is_int(self.top_logprobs) and self.top_logprobs >= 0, "top_logprobs", "must be an integer >= 0 (0 is off)"
        )
        require(_is_int(self.n) and self.n >= 1, "n", "must be an integer >= 1")
        for field in ("ignore_eos", "logprobs", "prompt_logprobs"):
            require(isinstance(getattr(self, field), bool), field, "must be true or false")
        if faults:
            raise ValueError("sampling: " + "; ".join(faults))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def inv_temp(self) -> np.float32:
        """1 / temperature in fp32, for log-probabilities (1 when greedy). Its bits travel with the tokens."""
        return np.float32(1.0) if self.greedy else _inverse(self.temperature)

    @property
    def sampler_inv_temp(self) -> np.float32:
        """What the sampler gets: `inv_temp`, and 0 for greedy."""
        return np.float32(0.0) if self.greedy else _inverse(self.temperature)


def sample_key(seed: int, index: int) -> np.ndarray:
    """Key of the sampler's counter-based random bits, uint32 [2], for sample `index` of a request with this seed.

    The index is a spawn key: as part of the entropy it could not be told from the high words of another seed.
    """
    return np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(2, np.uint32)


def assigned_seed(engine_seed: int, counter: int) -> int:
    """Seed of the request `counter` that came without one: 53 bits, so that JSON readers keep it exactly."""
    words = np.random.SeedSequence(engine_seed, spawn_key=(counter,)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(11))


def _inverse(temperature: float) -> np.float32:
    return np.float32(1.0) / np.float32(temperature)


def _is_real(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
