"""A completion's bits depend on its prompt, seed, parameters and weights alone (gates 1, 3, 4, 5, 6, 9 of the design).

Compared: tokens, both log-probabilities and whole logits rows, as bytes. Every test shows that its hazard fired.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isomodel import model
from isomodel.batch import Batch, KVCache
from isomodel.rollout import SamplingParams, pages
from isomodel.rollout.sampling_params import MAX_TEMPERATURE, MIN_TEMPERATURE
from tests.isomodel.rollout import tiny
from tests.isomodel.rollout.test_engine import counting_compilations

SAMPLING = SamplingParams(temperature=0.7, max_tokens=12)


@pytest.fixture(scope="module")
def work():
    return tiny.work()


def one_ulp_more(weights, name: str):
    """The weights with the largest element of one array moved to the next bfloat16."""
    w = np.asarray(weights[name]).copy()
    at = np.unravel_index(np.argmax(np.abs(w.astype(np.float32))), w.shape)
    w.view(np.uint16)[at] += 1
    return {**weights, name: jnp.asarray(w)}


def test_layers_laid_out_have_the_bits_of_their_loop():
    rng, cfg = np.random.default_rng(0), tiny.CONFIG
    filled = KVCache(*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in jax.tree.leaves(KVCache.zeros(cfg, 8, 128))))
    kv_len_S = jnp.array([1, 40, 129, 200], jnp.int32)
    table_SP = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    slot_S = jnp.take_along_axis(table_SP, (kv_len_S[:, None] - 1) // 128, axis=1)[:, 0] * 128 + (kv_len_S - 1) % 128
    batch = Batch(jnp.array([7, 1, 9, 4], jnp.int32), kv_len_S - 1, slot_S, jnp.arange(5, dtype=jnp.int32), kv_len_S, table_SP)

    @functools.partial(jax.jit, static_argnames="unroll")
    def run(weights, cache, unroll):
        return model.forward(cfg, tiny.BF16, weights, batch, cache, unroll=unroll)

    loop, laid_out, other = (
        jax.tree.leaves(run(weights, filled, unroll))
        for weights, unroll in (
            (tiny.params(), False),
            (tiny.params(), True),
            (one_ulp_more(tiny.params(), "layers.mixer.qkv"), True),
        )
    )
    same = lambda a, b: all(x.tobytes() == y.tobytes() for x, y in zip(map(np.asarray, a), map(np.asarray, b), strict=True))  # noqa: E731
    assert same(loop, laid_out) and not same(loop, other)
    assert not same(loop[1:], jax.tree.leaves(filled))  # keys and values were written


def test_control_one_ulp_in_one_weight_is_seen(work):
    prompts, sampling, want = work
    changed = tiny.engine(one_ulp_more(tiny.params(), "layers.mixer.qkv"))
    got = changed.generate(prompts, sampling)
    assert all(tiny.bits(g) != tiny.bits(w) for g, w in zip(got, want, strict=True))


def test_alone_and_in_a_batch(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    stats = engine.stats()
    assert stats.steps < sum(len(c.token_ids) for c in want) / 2, "requests ran side by side"
    engine.check()
    assert stats.pages_in_use == 0


def test_request_order_and_late_arrivals(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    order = np.random.default_rng(3).permutation(len(prompts))
    got = {}
    for count, i in enumerate(order):
        engine.add_request(prompts[i], sampling[i], f"r{i}")
        if count % 3 == 0:
            got |= {c.request_id: c for c in engine.step()}
    while engine.has_work:
        got |= {c.request_id: c for c in engine.step()}
    assert list(got) != [f"r{i}" for i in range(len(prompts))]
    tiny.assert_same_bits([got[f"r{i}"] for i in range(len(prompts))], want)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_prefill_in_chunks_of_any_size(work, chunk):
    prompts, sampling, want = work
    engine = tiny.engine(chunk_tokens=chunk)
    few = slice(6, 12)
    tiny.assert_same_bits(engine.generate(prompts[few], sampling[few]), want[few])
    assert engine.stats().steps > sum(map(len, prompts[few])) / (2 * chunk), "prompts were cut"


def test_a_prefix_hit_equals_a_cold_cache(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
    before = engine.stats()
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    after = engine.stats()
    assert after.prefix_hits - before.prefix_hits >= sum(len(p) // 16 for p in prompts) - 2
    assert after.prefill_rows - before.prefill_rows < sum(map(len, prompts)) / 2
    cold = tiny.engine(prefix_cache=False)
    cold.generate(prompts, sampling)
    assert cold.stats().prefix_hits == 0


def test_a_prefix_hit_on_the_whole_prompt():
    """The last row runs again for its logits and writes nothing: its page is shared."""
    prompt = tiny.prompts(1, seed=9, low=32, high=32)[0]
    sampling = dataclasses.replace(SAMPLING, seed=5)
    engine = tiny.engine()
    first, second = engine.generate([prompt], sampling), engine.generate([prompt], sampling)
    assert engine.stats().prefix_hits == 2 and engine.stats().prefill_rows == 33
    tiny.assert_same_bits(first + second, [tiny.alone(prompt, sampling)] * 2)


def test_preempted_and_resumed():
    prompts = tiny.prompts(8, seed=4, low=40, high=60)
    sampling = tiny.seeded(8, max_tokens=120)
    want = [tiny.alone(p, s) for p, s in zip(prompts, sampling, strict=True)]
    for cache in (False, True):
        engine = tiny.engine(prefix_cache=cache)
        got = engine.generate(prompts, sampling)
        assert engine.stats().preemptions > 0
        tiny.assert_same_bits(got, want)
        engine.check()


def test_a_neighbour_is_aborted(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    names = [engine.add_request(p, s) for p, s in zip(prompts, sampling, strict=True)]
    got = {}
    victims = [names[0], names[3], names[10]]
    for victim in victims:
        got |= {c.request_id: c for c in engine.step()}
        assert engine.abort(victim) == 1
    while engine.has_work:
        got |= {c.request_id: c for c in engine.step()}
    for victim in victims:
        assert got[victim].finish_reason == "abort"
        n = len(got[victim].token_ids)
        assert n < len(want[names.index(victim)].token_ids)
        assert got[victim].logprobs.tobytes() == want[names.index(victim)].logprobs[:n].tobytes()
    rest = [i for i, name in enumerate(names) if name not in victims]
    tiny.assert_same_bits([got[names[i]] for i in rest], [want[i] for i in rest])
    engine.check()


@pytest.mark.parametrize("prompt_len", [33, 48])
def test_samples_that_share_a_prompt_equal_independent_ones(prompt_len):
    """Full pages by reference, the partly filled last one (33 = 2 x 16 + 1) by copy."""
    prompt = tiny.prompts(1, seed=2, low=prompt_len, high=prompt_len)[0]
    sampling = SamplingParams(seed=11, n=6, max_tokens=20)
    engine = tiny.engine(prefix_cache=False)
    got = engine.generate([prompt], sampling)
    stats = engine.stats()
    assert stats.shared_pages == 5 * (prompt_len // 16) and stats.copied_pages == (5 if prompt_len % 16 else 0)
    assert len({c.token_ids.tobytes() for c in got}) == 6
    apart = tiny.engine(prefix_cache=False)
    for index, completion in enumerate(got):
        apart.add_request(prompt, sampling, "apart")
        request = apart._requests["apart"]
        for other in [s for s in request.samples if s.index != index]:
            apart._scheduler.waiting.remove(other)
            request.unattached -= 1
        while not (done := apart.step()):
            pass
        apart._requests.clear()
        assert tiny.bits(done[0]) == tiny.bits(completion)
    assert apart.stats().shared_pages == 0


def test_what_lies_in_free_pages_does_not_matter(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    shape, dtype = engine._runner.cache.k_LNpKd.shape, engine._runner.cache.k_LNpKd.dtype
    all_nan = lambda: KVCache(*(jnp.full(shape, jnp.nan, dtype) for _ in range(2)))  # noqa: E731
    engine._runner.cache = all_nan()
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    # Control: NaN in pages that are in use is seen.
    engine.add_request(prompts[5], sampling[5])
    engine.step()
    engine._runner.cache = all_nan()
    (broken,) = _drain(engine)
    assert tiny.bits(broken) != tiny.bits(want[5])


def _drain(engine):
    done = []
    while engine.has_work:
        done += engine.step()
    return done


def live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def test_released_pages_are_memory_for_others_and_no_bit_depends_on_them(work):
    prompts, sampling, want = work
    engine = tiny.engine()
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    before = live_bytes()
    with counting_compilations() as compiled:
        assert engine.release_pages() > 0
        assert before - live_bytes() == tiny.ENGINE.num_pages * tiny.ENGINE.page_bytes(tiny.CONFIG, tiny.BF16.dtype)
        assert engine.release_pages() == 0  # harmless twice
        hits = engine.stats().prefix_hits
        tiny.assert_same_bits(engine.generate(prompts, sampling), want)
        assert compiled == []
    assert engine.stats().prefix_hits == hits  # nothing was found again that is not there
    assert before == live_bytes()
    engine.check()


def test_control_a_page_that_was_released_and_not_forgotten_is_seen(work, monkeypatch):
    prompts, sampling, want = work
    engine = tiny.engine()
    engine.generate(prompts, sampling)
    monkeypatch.setattr(engine._pool, "drop_cached", lambda: 0)
    engine.release_pages()
    got = engine.generate(prompts, sampling)
    assert [tiny.bits(g) for g in got] != [tiny.bits(w) for w in want]


def test_pages_of_samples_in_flight_are_not_released():
    engine = tiny.engine()
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, seed=1), "a")
    engine.step()
    with pytest.raises(ValueError, match="1 requests are in flight"):
        engine.release_pages()
    engine.abort("a")
    engine.release_pages()


def test_new_weights_are_the_arrays_that_were_given():
    """Sync copies nothing: same buffers, and no more memory than before."""
    engine, new = tiny.engine(), tiny.params(1)
    before = live_bytes()
    engine.update_weights(new, 1)
    assert live_bytes() == before
    places = {name: w.unsafe_buffer_pointer() for name, w in new.items()}
    assert {name: w.unsafe_buffer_pointer() for name, w in engine._runner.params.items()} == places


def _begun(engine, prompts, sampling, looks: int) -> dict:
    """Adds all requests, named by their index, and steps; gives what has finished by then."""
    for i, (p, s) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(p, s, str(i))
    done = {}
    for _ in range(looks):
        done |= {c.request_id: c for c in engine.step()}
    return done


@pytest.fixture(scope="module")
def renewed(work):
    """The completions under the second weights."""
    prompts, sampling, _ = work
    return tiny.engine(tiny.params(1)).generate(prompts, sampling)


def test_after_new_weights_no_stale_page_is_used(work, renewed, monkeypatch):
    prompts, sampling, _ = work
    engine = tiny.engine()
    engine.generate(prompts, sampling)
    assert engine.update_weights(tiny.params(1), 7) > 0
    got = engine.generate(prompts, sampling)
    tiny.assert_same_bits(got, renewed)
    assert all((c.versions == 7).all() for c in got)
    # The version in the key is enough without dropping, and without both a stale page is used.
    for name_version, equal in ((True, True), (False, False)):
        with monkeypatch.context() as patch:
            if not name_version:
                patch.setattr(pages, "root_key", lambda version: b"no version")
            engine = tiny.engine()
            patch.setattr(engine._pool, "drop_cached", lambda: 0)
            engine.generate(prompts, sampling)
            engine.update_weights(tiny.params(1), 7)
            got = engine.generate(prompts, sampling)
        same = [tiny.bits(g) == tiny.bits(w) for g, w in zip(got, renewed, strict=True)]
        assert all(same) == equal


@pytest.mark.parametrize("policy", ["finish", "restart", "continue"])
def test_new_weights_with_samples_in_flight(work, renewed, policy):
    prompts, sampling, want = work
    engine = tiny.engine()
    done = _begun(engine, prompts, sampling, looks=4)
    engine.update_weights(tiny.params(1), 3, on_update=policy)
    engine.check()
    done |= {c.request_id: c for c in _drain(engine)}
    kinds = {"old": 0, "new": 0, "both": 0}
    for i in range(len(prompts)):
        versions = set(done[str(i)].versions.tolist())
        if versions == {0}:
            kinds["old"] += 1
            assert tiny.bits(done[str(i)]) == tiny.bits(want[i])
        elif versions == {3}:
            kinds["new"] += 1
            assert tiny.bits(done[str(i)]) == tiny.bits(renewed[i])
        else:
            kinds["both"] += 1
            _assert_continued(done[str(i)], want[i], sampling[i])
    assert kinds["new"] > 0
    assert (kinds["old"] > 0) == (policy == "finish") and (kinds["both"] > 0) == (policy == "continue")


def test_finish_takes_back_no_token_that_an_earlier_update_kept(work):
    """After "continue" samples wait with their tokens; the next update finds them not begun under its old weights."""
    prompts, sampling, want = work
    engine = tiny.engine()
    done = _begun(engine, prompts, sampling, looks=4)
    engine.update_weights(tiny.params(2), 1, on_update="continue")
    engine.update_weights(tiny.params(1), 2, on_update="finish")
    done |= {c.request_id: c for c in _drain(engine)}
    continued = [i for i in range(len(prompts)) if set(done[str(i)].versions.tolist()) == {0, 2}]
    assert len(continued) > 2 and not any(1 in c.versions for c in done.values())
    for i in continued:
        _assert_continued(done[str(i)], want[i], sampling[i])


def test_two_versions_side_by_side(work, renewed):
    """Samples in flight finish under their weights while others begin under the new ones: each has the bits of its own."""
    prompts, sampling, want = work
    engine = tiny.engine()
    done = _begun(engine, prompts, sampling, looks=1)
    assert not engine.updating
    engine.update_weights(tiny.params(1), 3, on_update="finish")
    assert engine.updating and engine.version == 3
    with pytest.raises(ValueError, match="samples of version 0 still finish beside those of 3"):
        engine.update_weights(tiny.params(2), 4, on_update="finish")
    beside = 0
    while engine.updating:
        done |= {c.request_id: c for c in engine.step()}
        engine.check()
        beside += {s.request.version for s in engine._scheduler.running} == {0, 3}
    assert beside > 2 and engine.has_work and not engine._runner.older, "the old weights are let go with their last sample"
    done |= {c.request_id: c for c in _drain(engine)}
    old = [i for i in range(len(prompts)) if (done[str(i)].versions == 0).all()]
    new = [i for i in range(len(prompts)) if (done[str(i)].versions == 3).all()]
    assert old and new and len(old) + len(new) == len(prompts)
    tiny.assert_same_bits([done[str(i)] for i in old], [want[i] for i in old])
    tiny.assert_same_bits([done[str(i)] for i in new], [renewed[i] for i in new])


def test_old_weights_are_let_go_when_their_last_sample_is_aborted_or_moves_on():
    for leave in (lambda e: e.abort("a"), lambda e: e.update_weights(tiny.params(2), 5, on_update="continue")):
        engine = tiny.engine()
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, seed=1), "a")
        engine.step()
        engine.update_weights(tiny.params(1), 3, on_update="finish")
        assert engine.updating and list(engine._runner.older) == [0]
        leave(engine)
        assert not engine.updating and not engine._runner.older
        _drain(engine)


def _assert_continued(got, old, sampling):
    """Old tokens up to the update; each later one as the new weights score it after exactly this prefix."""
    n = int((got.versions == 0).sum())
    assert got.versions.tolist() == sorted(got.versions.tolist()) and n > 0
    assert got.logprobs[:n].tobytes() == old.logprobs[:n].tobytes()
    rest = dataclasses.replace(sampling, max_tokens=len(got.token_ids) - n)
    fresh = tiny.engine(tiny.params(1), prefix_cache=False)
    (again,) = fresh.generate([np.concatenate([got.prompt_ids, got.token_ids[:n]])], rest)
    assert again.token_ids.tolist() == got.token_ids[n:].tolist()
    assert again.logprobs.tobytes() == got.logprobs[n:].tobytes()


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_at_the_ends_of_temperature_log_probabilities_are_numbers(temperature):
    """Below, sums of exponentials overflow: a fuzzer's temperature of 1e-16 brought NaN and tokens outside the top."""
    prompts = tiny.prompts(4)
    ways = [{}, {"top_k": 20}, {"top_p": 0.2}, {"min_p": 0.4, "top_k": 250}]
    asked = [SamplingParams(temperature=temperature, seed=i, max_tokens=16, **way) for i, way in enumerate(ways)]
    greedy = tiny.engine().generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for c, g in zip(tiny.engine().generate(prompts, asked), greedy, strict=True):
        for values in (c.logprobs, c.truncated_logprobs):
            assert np.isfinite(values).all() and (values <= 0).all()
        assert (temperature == MIN_TEMPERATURE) == (c.token_ids.tolist() == g.token_ids.tolist())


def test_the_trainer_gives_the_same_log_probabilities(work):
    prompts, sampling, want = work
    for completion in (want[0], want[5], want[11]):
        scores = tiny.score_as_trainer(tiny.params(), completion)
        assert scores.tobytes() == completion.logprobs.tobytes()
        other = tiny.score_as_trainer(one_ulp_more(tiny.params(), "layers.mlp.down"), completion)
        assert other.tobytes() != completion.logprobs.tobytes()


def test_prompt_log_probabilities_equal_the_sampled_ones(work):
    prompts, sampling, want = work
    picked = [1, 5, 10]
    rescore = [np.concatenate([prompts[i], want[i].token_ids]) for i in picked]
    ask = [dataclasses.replace(sampling[i], prompt_logprobs=True, n=2, max_tokens=3) for i in picked]
    results = []
    for chunk in (48, 13):
        engine = tiny.engine(prompt_logprobs=True, chunk_tokens=chunk)
        engine.generate(rescore, SAMPLING)  # fills the prefix cache, which must not be read for these requests
        hits = engine.stats().prefix_hits
        results.append(engine.generate(rescore, ask))
        assert engine.stats().prefix_hits == hits
    for got in results:
        tiny.assert_same_bits(got, results[0])
        for j, i in enumerate(picked):
            for completion in got[2 * j : 2 * j + 2]:
                n = len(want[i].token_ids)
                assert np.isnan(completion.prompt_logprobs[0]) and np.all(completion.prompt_logprobs[1:] <= 0)
                assert completion.prompt_logprobs[-n:].tobytes() == want[i].logprobs.tobytes()


def test_alternatives_have_the_bits_that_they_have_when_sampled(work):
    """Each of the k likeliest: its id from the logits row, its log-probability from the token's own score."""
    prompts, sampling, want = work
    ask = [dataclasses.replace(s, top_logprobs=4) for s in sampling]
    engine = tiny.engine(top_logprobs=5)
    got = engine.generate(prompts, ask)
    tiny.assert_same_bits(got, want)
    alone = tiny.engine(top_logprobs=5, prefix_cache=False)
    scorer = tiny.engine(prompt_logprobs=True)
    found = 0
    for i, completion in enumerate(got):
        (again,) = alone.generate([prompts[i]], ask[i])
        assert again.top_ids.tobytes() == completion.top_ids.tobytes()
        assert again.top_logprobs.tobytes() == completion.top_logprobs.tobytes()
        order = np.argsort(-completion.logits, axis=1, kind="stable")[:, :4]
        assert completion.top_ids.dtype == np.int32 and completion.top_ids.tolist() == order.tolist()
        n, k = np.nonzero(completion.top_ids == completion.token_ids[:, None])
        assert completion.top_logprobs[n, k].tobytes() == completion.logprobs[n].tobytes()
        found += len(n)
    assert found > 20
    completion = got[0]
    for at in (0, 5):
        for token, value in zip(completion.top_ids[at], completion.top_logprobs[at], strict=True):
            text = [*completion.prompt_ids, *completion.token_ids[:at], token]
            score = dataclasses.replace(sampling[0], prompt_logprobs=True, max_tokens=1)
            assert scorer.generate([text], score)[0].prompt_logprobs[-1].tobytes() == value.tobytes()


def test_alternatives_under_restart_preemption_and_refusal():
    prompts = tiny.prompts(8, seed=4, low=40, high=60)
    sampling = tiny.seeded(8, max_tokens=120, top_logprobs=2)
    alone = tiny.engine(top_logprobs=5, prefix_cache=False)
    want = [alone.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    engine = tiny.engine(top_logprobs=5)
    got = engine.generate(prompts, sampling)
    assert engine.stats().preemptions > 0
    assert [c.top_logprobs.tobytes() for c in got] == [c.top_logprobs.tobytes() for c in want]
    name = engine.add_request(prompts[0], sampling[0])
    for _ in range(3):
        engine.step()
    tail = engine.tail(name, 0, 1)
    assert len(tail.token_ids) > 1 and tail.top_ids.shape == (len(tail.token_ids), 2)
    assert tail.top_logprobs.tobytes() == want[0].top_logprobs[1 : 1 + len(tail.token_ids)].tobytes()
    engine.update_weights(tiny.params(), 1, on_update="restart")
    (again,) = _drain(engine)
    assert again.top_ids.tobytes() == want[0].top_ids.tobytes()
    assert engine.generate([prompts[0]], SAMPLING)[0].top_ids is None
    with pytest.raises(ValueError, match="top_logprobs=6, and the engine was made with top_logprobs=5"):
        engine.add_request([1], SamplingParams(top_logprobs=6))
