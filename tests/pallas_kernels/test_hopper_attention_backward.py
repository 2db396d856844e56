"""The Hopper attention backward without a GPU: its plan of work against plain loops, and every schedule lowered for CUDA.

JAX's interpreter runs neither wgmma with an operand in registers nor accumulators that begin at given values, so the
kernel itself runs in tests/gpu only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import hopper_backward as backward

LENGTHS = (
    ((5, 0), (0, 0), (640, 0), (129, 0)),
    ((1, 127), (0, 300), (64, 65), (128, 1), (0, 0)),
    ((1000, 0),),
)
"""(queries, positions before them) of each sequence."""


def arrays(lengths):
    start = np.concatenate([[0], np.cumsum([n for n, _ in lengths])]).astype(np.int32)
    return start, np.array([sum(n) for n in lengths], np.int32)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("d", backward.SCHEDULES)
def test_plan_holds_every_key_tile_once_and_none_before_those_it_waits_for(d, lengths):
    schedule = backward.SCHEDULES[d]
    start, kv_len = arrays(lengths)
    tiles = -(-kv_len // schedule.keys)
    seq, tile, _ = map(
        np.asarray, backward.plan(jnp.asarray(start), jnp.asarray(kv_len), schedule, int(tiles.sum()) + 3)
    )
    real = list(zip(seq[tile < backward.NOWHERE].tolist(), tile[tile < backward.NOWHERE].tolist(), strict=True))
    assert sorted(real) == [(s, t) for s in range(len(lengths)) for t in range(tiles[s])]
    assert (tile[len(real) :] == backward.NOWHERE).all(), "work comes first"
    for s in range(len(lengths)):
        assert [t for at, t in real if at == s] == list(range(tiles[s])), "a tile waits for those before it"
    left = [tiles[s] - t for s, t in real]
    assert left == sorted(left, reverse=True), "longest first"


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("d", backward.SCHEDULES)
def test_every_row_has_a_place_of_its_own_in_the_query_tiles(d, lengths):
    """As the kernel counts tiles: from the last multiple of ALIGN rows at or before a sequence's first."""
    schedule = backward.SCHEDULES[d]
    start, kv_len = arrays(lengths)
    T = int(start[-1]) + 13
    most = T // schedule.queries + 2 * len(lengths)
    _, _, first = map(np.asarray, backward.plan(jnp.asarray(start), jnp.asarray(kv_len), schedule, 1))
    place = np.asarray(backward.places(jnp.asarray(start), jnp.asarray(first), T, schedule, most))
    want = []
    for s, (n, _) in enumerate(lengths):
        ragged = int(start[s]) % backward.ALIGN
        want += [int(first[s]) * schedule.queries + ragged + i for i in range(n)]
        assert not n or (want[-1] // schedule.queries) < (first[s + 1] if s + 1 < len(lengths) else most)
    assert place[: len(want)].tolist() == want and len(set(want)) == len(want)
    assert (place[len(want) :] >= most * schedule.queries).all(), "padding rows have none"


@pytest.mark.parametrize(
    "d, page, G", [(64, 128, 3), (64, 8, 1), (128, 128, 4), (128, 16, 16), (256, 128, 8), (256, 32, 2)]
)
def test_lowers_for_cuda(d, page, G):
    T, K, N, S, P = 203, 2, 9, 3, 128 // page * 3
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    rows, pages = shape(jnp.bfloat16, T, K * G, d), shape(jnp.bfloat16, N, page, K, d)
    where = (shape(jnp.int32, S + 1), shape(jnp.int32, S), shape(jnp.int32, S, P))
    args = (rows, pages, pages, *where, rows, shape(jnp.float32, T, K * G), rows)
    lowered = jax.jit(backward.attention_backward).trace(*args).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.out_info) == tuple(
        (x.shape, x.dtype) for x in (rows, pages, pages)
    )
