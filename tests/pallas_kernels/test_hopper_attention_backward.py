"""The Hopper attention backward without a GPU: its plan of work against plain loops, its body in the interpreter with race
detection, and every schedule lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import mosaic
from pallas_kernels.attention import hopper_backward as backward
from tests.pallas_kernels.attention_work import Work, differences, wide
from tests.pallas_kernels.base import relative
from tests.pallas_kernels.registers import emulated

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


def causal(x_KQ, ahead):
    key, query = (jax.lax.broadcasted_iota(jnp.int32, x_KQ.shape, i) for i in (0, 1))
    return jnp.where(query - key >= ahead, x_KQ, 0)


def interpret(work: Work):
    with mosaic.interpreted(), emulated(backward, _causal=causal):
        got = jax.jit(backward.attention_backward)(*work.args)
    for name, g, want in zip(("dq", "dk", "dv"), got, work.want, strict=True):
        assert relative(wide(g), want) < 4e-3, name
    assert work.exact_zeros(got)


@pytest.mark.parametrize(
    "d, H, K, page, lengths",
    [
        (64, 3, 1, 8, ((70, 0), (20, 100))),
        (128, 2, 1, 64, ((70, 3), (0, 9), (3, 0))),
        (256, 2, 1, 32, ((9, 20), (64, 0))),
    ],
)
def test_body_against_float64_without_races(d, H, K, page, lengths):
    """One key tile a sequence: steps and stages of a program."""
    interpret(Work(lengths, H, K, d, page, padding=9))
    assert not gpu_callbacks.get_races().races_found


def test_key_tiles_add_to_dq():
    """Several key tiles a sequence; their turns are counters, of which the interpreter's race detector knows nothing."""
    interpret(Work(((130, 66), (5, 0)), 2, 1, 128, 128, padding=9))


def test_order_of_launch_does_not_reach_the_bits(monkeypatch):
    """Which sequence's programs come first: no two write to one place. The control, and what a differing run is told to
    look like: a page of two sequences, which the op forbids where it has a gradient, holds what came last."""
    work = Work(((130, 0), (5, 0)), 1, 1, 64, 128, padding=9)
    table = np.asarray(work.inputs[5]).copy()
    table[1, 0] = table[0, 1]
    of_two = (*work.args[:5], jnp.asarray(table), *work.args[6:])
    plan = backward.plan

    @jax.jit
    def run(last_first, args):
        def planned(*args):
            seq_C, tile_C, q_tile_S = plan(*args)
            order_C = jnp.argsort(jnp.where(tile_C < backward.NOWHERE, -seq_C * last_first, 1), stable=True)
            return seq_C[order_C], tile_C[order_C], q_tile_S

        monkeypatch.setattr(backward, "plan", planned)
        return backward.attention_backward(*args)

    def lines(args):
        with mosaic.interpreted(), emulated(backward, _causal=causal):
            return differences([run(last_first, args) for last_first in (0, 1)], args)

    assert lines(work.args) == []
    page = f"1 pages: {table[0, 1]} (sequence 0's 1 and sequence 1's 0);"
    assert [(line[:9], page in line) for line in lines(of_two)] == [("run 1, dk", True), ("run 1, dv", True)]


def test_a_missing_fence_is_found():
    """The control: what is written to shared memory is not fenced before the tensor core and TMA read it."""
    with mosaic.interpreted(), emulated(backward, _causal=causal) as stand_ins:
        stand_ins["plgpu"].commit_smem = lambda: None
        jax.jit(backward.attention_backward)(*Work(((40, 0),), 1, 1, 64, 128, padding=8).args)
    assert gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("page, G", [(128, 3), (32, 1), (8, 16)])
@pytest.mark.parametrize("d", backward.SCHEDULES)
def test_every_schedule_lowers_for_cuda(d, page, G):
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
