"""The decode loop without its model: what it tells attention about lengths before its first step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isomodel import model
from isomodel.rollout import programs
from isomodel.rollout.outputs import Chosen
from isomodel.rollout.slots import DEVICE_STOPS
from tests.isomodel.rollout import tiny

SHAPES = programs.Shapes(num_pages=9, page_size=16, table_width=4, decode_steps=5, return_logits=False)


@pytest.mark.parametrize("stop, most", [(-1, 4), (16, 2)])
def test_lengths_stay_between_those_that_attentions_lists_are_made_for(stop, most, monkeypatch):
    """Samples that run on or meet a stop token, one that may get one token, one that may get none, and no sample."""
    S, seen = 5, []

    def work_of(cfg, numerics, q_start_S1, shortest_S, longest_S, *_, **__):
        return lambda kv_len_S: jax.debug.callback(lambda *x: seen.append(x), shortest_S, kv_len_S, longest_S, ordered=True)

    def choose(cfg, numerics, shapes, params, hidden_SD, positions_S, *_):
        return Chosen(positions_S, jnp.zeros(S), jnp.zeros(S))  # a sample's token is its length

    monkeypatch.setattr(model, "attention_work_of", work_of)
    monkeypatch.setattr(model, "forward", lambda cfg, numerics, params, batch, cache, **_: (jnp.zeros((S, 1)), cache))
    monkeypatch.setattr(programs, "_choose", choose)
    kv_len, room = np.array([15, 1, 7, 9, 0], np.int32), np.array([9, 9, 1, 0, 0], np.int32)
    stops = np.full((S, DEVICE_STOPS), -1, np.int32)
    stops[0, 0] = stop
    state = programs.Decoding(np.arange(S, dtype=np.int32), kv_len, room, stops, np.zeros((S, 4), np.int32), np.int32(4))
    sampling = programs.Sampling(jnp.zeros((S, 2), jnp.uint32), jnp.ones(S), jnp.zeros(S, jnp.int32), jnp.ones(S), jnp.zeros(S))
    loop = jax.jit(functools.partial(programs.decode_loop, tiny.CONFIG, tiny.BF16, SHAPES))
    _, counts, _, (_, after, room_after) = loop({}, None, state, sampling, None)
    jax.effects_barrier()
    assert counts.tolist() == [most, 4, 1, 0, 0] and len(seen) == 4
    # Where a loop that follows begins: who stopped gets no more, and reads next to nothing.
    assert after.tolist() == [15 + most if stop < 0 else 2, 5, 2, 2, 0] and room_after.tolist() == [5 if stop < 0 else 0, 5, 0, 0, 0]
    for shortest, lengths, longest in seen:
        assert (shortest <= lengths).all() and (lengths <= longest).all()
    # Neither bound is looser than it has to be: a stop token is not known before.
    assert seen[0][0].tolist() == seen[0][1].tolist() == [15, 1, 7, 8, 0]
    assert seen[-1][1].tolist() == [14 + most, 4, 7, 8, 0] and seen[-1][2].tolist() == [18, 4, 7, 8, 0]
