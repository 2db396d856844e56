"""Replays one sequence as training runs it and as a rollout runs it, region by region, and finds where the bits part."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from isomodel import model
from isomodel.batch import KVCache, Rows, TrainPages, make_batch
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.specs import Params

PAGE_SIZE = 128
OUTSIDE_LAYERS = ("embed", "final_norm", "lm_head", "logprob")


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first region, in the order of computation, whose bits differ.

    Attributes:
      region: its name in the contract; layer: its layer, None outside the layers.
      position: the first token position that differs there. positions: how many do.
      max_abs: largest absolute difference.
    """

    region: str
    layer: int | None
    position: int
    positions: int
    max_abs: float

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        return (
            f"{self.region}{layer}: {self.positions} positions differ, the first at {self.position}, "
            f"by up to {self.max_abs:.3g}"
        )


def bit_view(x: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers."""
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def first_divergence(
    cfg: ModelConfig, numerics: Numerics, params: Params, token_ids: np.ndarray, prompt_len: int
) -> Divergence | None:
    """Where training's forward of a sequence and a rollout's part, or None when every region has equal bits.

    The rollout is a prefill of the prompt and a decode step for each later token.

    Args:
      params: weights in the compute dtype.
      token_ids: int [n], the whole sequence.
      prompt_len: tokens of the prompt, at least 1.

    Raises:
      ValueError: the lengths do not fit each other or the model.
    """
    token_ids = np.asarray(token_ids, np.int32)
    if not 1 <= prompt_len <= len(token_ids) <= cfg.max_positions:
        raise ValueError(
            f"cannot replay {len(token_ids)} tokens with a prompt of {prompt_len}: it needs "
            f"1 <= prompt <= tokens <= {cfg.max_positions}"
        )
    trained = trained_regions(cfg, numerics, params, token_ids)
    rolled = rolled_regions(cfg, numerics, params, token_ids, prompt_len)
    for region, layer in _order(cfg, trained):
        a, b = (regions[region] if layer is None else regions[region][layer] for regions in (trained, rolled))
        differs = (bit_view(a) != bit_view(b)).reshape(len(a), -1).any(axis=1)
        if differs.any():
            a, b = a[differs].astype(np.float64), b[differs].astype(np.float64)
            gap = np.abs(np.subtract(a, b, where=a != b, out=np.zeros_like(a)))
            return Divergence(region, layer, int(differs.argmax()), int(differs.sum()), float(np.nanmax(gap)))
    return None


def first_divergent_region(cfg, numerics, params, token_ids, prompt_len: int) -> str:
    """`first_divergence` in words; arguments and errors as there."""
    found = first_divergence(cfg, numerics, params, token_ids, prompt_len)
    if found:
        return str(found)
    return (
        "none: replayed alone, the sequence has the same bits in every region, so look at what it was sampled with "
        "(other weights or a stale cache) or beside (its batch)"
    )


def _order(cfg: ModelConfig, regions: dict) -> list[tuple[str, int | None]]:
    inside = [name for name in regions if name not in OUTSIDE_LAYERS]
    first, *rest = [(name, None) for name in OUTSIDE_LAYERS]
    return [first, *((name, layer) for layer in range(cfg.num_layers) for name in inside), *rest]


def _with_head(cfg, numerics, params, targets_T, hidden_TD, regions):
    ones_T = jnp.ones(targets_T.shape, jnp.float32)
    return regions | {
        "lm_head": model.logits(cfg, numerics, params, hidden_TD),
        "logprob": model.logprobs(cfg, numerics, params, hidden_TD, targets_T, ones_T),
    }


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _score(cfg, numerics, params, pages, batch, targets_T):
    hidden_TD, _, regions = model.trace(cfg, numerics, params, batch, pages)
    return _with_head(cfg, numerics, params, targets_T, hidden_TD, regions)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _roll(cfg, numerics, params, cache, batch, targets_T):
    hidden_TD, cache, regions = model.trace(cfg, numerics, params, batch, cache)
    return cache, _with_head(cfg, numerics, params, targets_T, hidden_TD, regions)


def _rows_of(regions: dict, n: int) -> dict[str, np.ndarray]:
    """The first n rows of every region, on the host."""
    return {k: np.asarray(v)[:n] if k in OUTSIDE_LAYERS else np.asarray(v)[:, :n] for k, v in regions.items()}


def _padded(n: int) -> int:
    return -(-n // PAGE_SIZE) * PAGE_SIZE


def _targets(token_ids: np.ndarray, start: int, stop: int, T: int) -> jax.Array:
    """The token after each row; the last of the sequence is followed by its first, on both sides."""
    targets_T = np.zeros(T, np.int32)
    targets_T[: stop - start] = np.roll(token_ids, -1)[start:stop]
    return jnp.asarray(targets_T)


def trained_regions(cfg, numerics, params, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """{region: [n, ...] or [L, n, ...]} of a training forward of the sequence alone."""
    n, T = len(token_ids), _padded(len(token_ids))
    batch = make_batch([Rows(token_ids, 0, n, range(T // PAGE_SIZE))], PAGE_SIZE, T=T, S=1, P=T // PAGE_SIZE)
    pages = TrainPages(T // PAGE_SIZE, PAGE_SIZE)
    return _rows_of(_score(cfg, numerics, params, pages, batch, _targets(token_ids, 0, n, T)), n)


def rolled_regions(cfg, numerics, params, token_ids: np.ndarray, prompt_len: int) -> dict[str, np.ndarray]:
    """{region: [n, ...] or [L, n, ...]} of a prefill of the prompt and decode steps, the sequence alone."""
    n = len(token_ids)
    num_pages = _padded(n) // PAGE_SIZE
    cache = KVCache.zeros(cfg, num_pages, PAGE_SIZE, numerics.dtype)
    parts = []
    for start, stop in [(0, prompt_len), *((i, i + 1) for i in range(prompt_len, n))]:
        T = _padded(prompt_len) if start == 0 else 1
        batch = make_batch([Rows(token_ids, start, stop, range(num_pages))], PAGE_SIZE, T=T, S=1, P=num_pages)
        cache, regions = _roll(cfg, numerics, params, cache, batch, _targets(token_ids, start, stop, T))
        parts.append(_rows_of(regions, stop - start))
    return {k: np.concatenate([p[k] for p in parts], axis=0 if k in OUTSIDE_LAYERS else 1) for k in parts[0]}
