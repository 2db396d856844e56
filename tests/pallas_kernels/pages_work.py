"""Rows that go to pages: what every implementation of `qk_norm_rope.to_pages` is asked."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

LAYERS, PAGES, PAGE = 3, 6, 8


def slots(T: int) -> np.ndarray:
    """A place for each of T <= 48 rows, no two alike, but every seventh row goes nowhere: by one, or by far."""
    found = np.random.default_rng(5).permutation(PAGES * PAGE)[:T].astype(np.int32)
    found[3::7] = [PAGES * PAGE if i % 2 else 2**30 for i in range(len(found[3::7]))]
    return found


def pages(K: int, d: int) -> list[jnp.ndarray]:
    """Of keys and of values, full of values of their own, some NaN."""
    rng = np.random.default_rng(6)
    full = [rng.standard_normal((LAYERS, PAGES, PAGE, K, d)) for _ in range(2)]
    for x in full:
        x[:, ::2, 3] = np.nan
    return [jnp.asarray(x, jnp.bfloat16) for x in full]


def placed(pages_LNpKd, x_TKd, slots_T, layer: int) -> np.ndarray:
    """The pages with the rows in their places, written one by one."""
    out = np.array(pages_LNpKd)
    for x, slot in zip(np.asarray(x_TKd), slots_T, strict=True):
        if slot < PAGES * PAGE:
            out[layer, slot // PAGE, slot % PAGE] = x
    return out
