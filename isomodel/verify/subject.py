"""The model under test, the work that it is given, and the two ways of looking at it: an engine's and a trainer's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model
from isomodel.batch import Batch, Rows, TrainPages, make_batch
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.replay import bit_view
from isomodel.rollout import Completion, Engine, EngineConfig, SamplingParams
from isomodel.specs import Params

PAGE_SIZE = 128
LENGTHS = (1, 17, 63, 64, 65, 127, 128, 129)
"""Prompt lengths: around half a KV block and a whole one, so that sampled tokens cross both edges."""
TEMPERATURES = (0.7, 1.0, 1.3)


@dataclasses.dataclass(frozen=True)
class GateResult:
    """What one gate saw.

    Attributes:
      gate: its name. regime: what was compared with what.
      compared: values compared as integers. differing: how many had other bits.
      max_abs: largest absolute difference of a log-probability, nats.
      hazard: what happened, in words with a count; `hazard_fired` is False when it did not.
    """

    gate: str
    regime: str
    compared: int
    differing: int
    max_abs: float
    hazard: str
    hazard_fired: bool = True

    @property
    def passed(self) -> bool:
        """Nothing differs, something was compared, and the hazard was real."""
        return self.differing == 0 and self.compared > 0 and self.hazard_fired


class Tally:
    """Counts values whose bits differ."""

    def __init__(self):
        self.compared = self.differing = 0
        self.max_abs = 0.0

    def add(self, got: np.ndarray | None, want: np.ndarray | None) -> None:
        """Compares two arrays of one dtype as integers; a missing one, or another shape, differs in every value."""
        if got is None or want is None or got.shape != want.shape:
            sizes = [x.size for x in (got, want) if x is not None]
            lost = max(sizes, default=1) or 1
            self.compared, self.differing, self.max_abs = self.compared + lost, self.differing + lost, float("inf")
            return
        self.compared += got.size
        different = bit_view(got) != bit_view(want)
        self.differing += int(different.sum())
        if different.any() and got.dtype == np.float32:
            gap = np.abs(got[different].astype(np.float64) - want[different])
            self.max_abs = max(self.max_abs, float(np.nan_to_num(gap, nan=np.inf).max()))

    def add_completions(self, got: Sequence[Completion], want: Sequence[Completion]) -> None:
        """Tokens, both log-probabilities and whole vocabulary rows of each pair."""
        for g, w in zip(got, want, strict=True):
            self.add(g.token_ids.astype(np.int32), w.token_ids.astype(np.int32))
            for field in ("logprobs", "truncated_logprobs", "logits"):
                self.add(getattr(g, field), getattr(w, field))

    def result(self, gate: str, regime: str, hazard: str, fired: bool = True) -> GateResult:
        return GateResult(gate, regime, self.compared, self.differing, self.max_abs, hazard, fired)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _score(cfg: ModelConfig, numerics: Numerics, num_pages: int, mode: str, params, batch, targets_T, inv_temp_T):
    """Log-probabilities [T], and but for "score" a number that needs their gradient. One program for every Subject of a model."""

    def logprobs(masters, remat):
        pages = TrainPages(num_pages, PAGE_SIZE)
        hidden_TD, _ = model.forward(cfg, numerics, params, batch, pages, masters=masters, remat=remat)
        return model.logprobs(cfg, numerics, params, hidden_TD, targets_T, inv_temp_T, masters=masters)

    if mode == "score":
        return logprobs(None, False)
    masters = {name: w.astype(jnp.float32) for name, w in params.items()}

    def loss(masters):
        values = logprobs(masters, mode == "remat")
        return values.mean(), values

    # The gradient is returned, so that the backward pass really shapes the program.
    (_, values), grads = jax.value_and_grad(loss, has_aux=True)(masters)
    return values, sum(jnp.sum(jnp.abs(g)) for g in grads.values())


class Subject:
    """A model, prompts around the block edges with sampling parameters, and their completions alone: what every gate
    compares with.

    Args:
      tokens: sampled for each prompt.
      seed: of prompts and requests.
    """

    def __init__(self, cfg: ModelConfig, numerics: Numerics, params: Params, *, tokens: int = 8, seed: int = 0):
        if cfg.max_positions < LENGTHS[-1] + tokens:
            raise ValueError(f"verify needs {LENGTHS[-1] + tokens} positions, the model has {cfg.max_positions}")
        self.cfg, self.numerics, self.params = cfg, numerics, params
        rng = np.random.default_rng(seed)
        self.prompts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in LENGTHS]
        self.sampling = [
            SamplingParams(max_tokens=tokens, seed=seed + i, temperature=TEMPERATURES[i % 3], ignore_eos=True)
            for i in range(len(LENGTHS))
        ]

    def engine(self, **changes) -> Engine:
        """An engine of one shape, with `changes` to its EngineConfig; programs compile when first used."""
        config = EngineConfig(
            max_seqs=8,
            max_model_len=256,
            num_pages=160,
            chunk_tokens=256,
            decode_steps=4,
            prefix_cache=False,
            prompt_logprobs=False,
            return_logits=True,
            seq_buckets=(8,),
            token_buckets=(256,),
        )
        return Engine(self.cfg, self.params, self.numerics, dataclasses.replace(config, **changes), warmup=False)

    def run(self, engine: Engine, order: Sequence[int] | None = None) -> list[Completion]:
        """The work in one batch, submitted in `order`, returned in the prompts' own order."""
        order = list(range(len(self.prompts)) if order is None else order)
        completions = engine.generate([self.prompts[i] for i in order], [self.sampling[i] for i in order])
        return [completions[order.index(i)] for i in range(len(self.prompts))]

    @functools.cached_property
    def alone(self) -> list[Completion]:
        """Each prompt's completion with nothing beside it and nothing before it."""
        engine = self.engine()
        return [engine.generate([p], [s])[0] for p, s in zip(self.prompts, self.sampling, strict=True)]

    def score(self, completions: Sequence[Completion], mode: str, order: Sequence[int] | None = None):
        """Log-probabilities of sampled tokens by the trainer's forward, one array a completion.

        Args:
          mode: "score" (no gradient), "train" or "remat".
          order: packing order of the completions in one batch; None: each in a batch of its own.
        """
        groups = [[i] for i in range(len(completions))] if order is None else [list(order)]
        scores: dict[int, np.ndarray] = {}
        for group in groups:
            rows, targets, inv_temps, pages = [], [], [], 0
            for i in group:
                ids = np.concatenate([completions[i].prompt_ids, completions[i].token_ids])
                count = -(-len(ids) // PAGE_SIZE)
                rows.append(Rows(ids, 0, len(ids) - 1, range(pages, pages + count)))
                targets.append(ids[1:])
                inv_temps.append(np.full(len(ids) - 1, completions[i].inv_temp, np.float32))
                pages += count
            total = sum(map(len, targets))
            T = 256 * -(-total // 256)
            num_pages = 2 if order is None else 2 * len(group)
            batch = make_batch(rows, PAGE_SIZE, T=T, S=len(group), P=2)
            pad = lambda parts: np.pad(np.concatenate(parts), (0, T - total), constant_values=1)  # noqa: B023, E731
            out = _score(self.cfg, self.numerics, num_pages, mode, self.params, batch, pad(targets), pad(inv_temps))
            values = np.asarray(out if mode == "score" else out[0])
            for i, start in zip(group, np.cumsum([0, *map(len, targets)]), strict=False):
                first = start + len(completions[i].prompt_ids) - 1
                scores[i] = values[first : first + len(completions[i].token_ids)]
        return [scores[i] for i in range(len(completions))]

    def cache_batch(self, index: int) -> tuple[Batch, Batch]:
        """Two batches of completion `index` on scattered pages of 16: all but its last token, and the last alone."""
        completion = self.alone[index]
        ids = np.concatenate([completion.prompt_ids, completion.token_ids])[:-1]
        pages = [int(p) for p in np.random.default_rng(index).permutation(32)[: -(-len(ids) // 16)]]
        n = len(ids)
        make = lambda a, b, T: make_batch([Rows(ids, a, b, pages)], 16, T=T, S=1, P=16)  # noqa: E731
        return make(0, n - 1, 256), make(n - 1, n, 1)
