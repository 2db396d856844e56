"""The benchmark of shared prompts without a GPU: its tables share what they say, and its loops lower."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import shared
from pallas_kernels.attention import hopper_shared
from pallas_kernels.attention.hopper_tiles import Shape

SHAPE = Shape(shared.H, shared.K, shared.D, shared.PAGE)


@pytest.mark.parametrize("width, prompts", [(w, p) for w, of_width in shared.WORK.items() for p in of_width], ids=str)
def test_prompts_share_their_whole_blocks(width, prompts):
    where = prompts.where(width)
    found, _ = hopper_shared.groups(*where, SHAPE, worth=lambda *_: True)
    used = prompts.number * prompts.samples
    blocks = prompts.shared // SHAPE.block if prompts.samples > 1 else 0
    assert found.tolist() == [blocks] * used + [0] * (shared.S - used)
    need = -(-(prompts.shared + prompts.own) // shared.PAGE)
    assert len(np.unique(np.asarray(where[2])[:used, :need])) == prompts.pages


@pytest.mark.parametrize("name, kernels", [("apart", 2), ("together", 3)])
def test_loops_lower(name, kernels):
    q = jax.ShapeDtypeStruct((shared.S, shared.H, shared.D), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((shared.LAYERS * 40 * shared.PAGE, shared.K * shared.D), jnp.bfloat16)
    where = shared.WORK[2560][0].where(2560)
    lowered = jax.jit(shared.loop(shared.SHARES[name], 40)).trace(q, pages, pages, *where).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == kernels
