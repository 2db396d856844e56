"""The engine as a user meets it: errors before anything is scheduled, what ends a completion, no late compilation."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from isomodel.contract import derive, trace_cases
from isomodel.rollout import EngineConfig, SamplingParams, programs, slots
from isomodel.rollout.outputs import Completion
from pallas_kernels import registry
from tests.isomodel.rollout import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Letters:
    """A codec of 300 tokens: token i is a letter and a digit or more, joined without spaces."""

    def encode(self, text):
        return [ord(c) % 300 for c in text]

    def decode(self, ids):
        return "".join(f"{chr(97 + i % 26)}{i // 26}" for i in ids)


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(tokenizer=Letters())


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], GREEDY, "is empty"),
        ([1, 300], GREEDY, "token 1 of the prompt is 300; the vocabulary has 0 to 299"),
        ([-1], GREEDY, "token 0 of the prompt is -1"),
        ([0.5], GREEDY, "must be a list of token ids"),
        ([[1, 2]], GREEDY, "must be a list of token ids"),
        ([1] * 256, GREEDY, "256 tokens; max_model_len=256 leaves no room"),
        ([1], SamplingParams(stop_token_ids=(300,)), r"stop_token_ids \[300\] are outside"),
        ([1], SamplingParams(prompt_logprobs=True), "prompt_logprobs=False"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_a_bad_request_is_refused_and_others_go_on(engine, prompt, sampling, message):
    neighbour = tiny.prompts(1)[0]
    engine.add_request(neighbour, GREEDY, "neighbour")
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, sampling)
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        engine.generate([[1, 2], prompt], [GREEDY, sampling])
    done = drain(engine)
    assert [c.request_id for c in done] == ["neighbour"], "nothing of the refused calls was queued"
    tiny.assert_same_bits(done, [tiny.alone(neighbour, GREEDY)])
    engine.check()


def drain(engine):
    done = []
    while engine.has_work:
        done += engine.step()
    return done


def test_an_engine_without_logprobs_samples_the_same_and_refuses_to_be_asked():
    prompts, ask = tiny.prompts(3), SamplingParams(max_tokens=6, seed=3, top_k=5, logprobs=False)
    engine = tiny.engine(logprobs=False)
    with_them = tiny.engine().generate(prompts, ask)
    without = engine.generate(prompts, ask)
    assert [c.token_ids.tolist() for c in without] == [c.token_ids.tolist() for c in with_them]
    with pytest.raises(ValueError, match="logprobs was asked for, and the engine was made with logprobs=False"):
        engine.generate(prompts, SamplingParams(max_tokens=1))
    for case, trace in engine.traces().items():
        with registry.recording() as found:
            trace()
        assert found and "logprob" not in found, case


def test_every_bad_prompt_is_named(engine):
    with pytest.raises(ValueError) as e:
        engine.generate([[], [1], [999]], GREEDY)
    assert "prompt 0: " in str(e.value) and "prompt 2: " in str(e.value) and "prompt 1" not in str(e.value)
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        engine.generate([[1], [2]], [GREEDY])


def test_a_request_larger_than_the_cache_is_refused():
    engine = tiny.engine(num_pages=4)
    with pytest.raises(ValueError, match="71 tokens .* need 5 pages of 16, and the KV cache has 4"):
        engine.add_request([1] * 10, SamplingParams(max_tokens=61))
    engine.add_request([1] * 10, SamplingParams(max_tokens=55))


def test_text_needs_a_tokenizer():
    bare = tiny.engine()
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.add_request("text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        bare.add_request([1], SamplingParams(stop="x"))


def test_names(engine):
    taken = str(engine.stats().requests + 1)
    engine.add_request([1], GREEDY, taken)
    (beside,) = engine.generate([[2]], GREEDY)
    assert beside.request_id == taken + "'", "an assigned name keeps clear of a chosen one"
    drain(engine)
    engine.add_request([1], GREEDY, "mine")
    with pytest.raises(ValueError, match="'mine' is running already"):
        engine.add_request([2], GREEDY, "mine")
    assert engine.abort("mine") == 1 and engine.abort("mine") == 0 and engine.abort("nobody") == 0
    (aborted,) = drain(engine)
    assert aborted.finish_reason == "abort" and aborted.token_ids.size == 0 and aborted.logprobs.size == 0


def test_tails_are_the_completion_as_it_grows(engine):
    params = SamplingParams(n=2, max_tokens=23, seed=4)
    name = engine.add_request(tiny.prompts(1)[0], params)
    assert engine.tail(name, 0, 0).token_ids.size == 0, "it has not begun"
    seen, done = {0: [], 1: []}, []
    while engine.has_work:
        done += engine.step()
        for i, tails in seen.items():
            tail = engine.tail(name, i, sum(t.token_ids.size for t in tails))
            if tail is not None:
                tails.append(tail)
    for completion in done:
        tails = seen[completion.index]
        tokens, logprobs = (np.concatenate(x) for x in zip(*((t.token_ids, t.logprobs) for t in tails), strict=True))
        assert len(tails) > 3 and 0 < len(tokens) < 23
        assert tokens.tobytes() == completion.token_ids[: len(tokens)].tobytes()
        assert logprobs.tobytes() == completion.logprobs[: len(tokens)].tobytes()
    assert engine.tail(name, 0, 0) is None and engine.tail("nobody", 0, 0) is None


def test_stop_tokens_and_end_of_sequence(engine):
    prompt = tiny.prompts(1, seed=3)[0]
    free = SamplingParams(seed=2, max_tokens=30, temperature=1.3)
    (whole,) = engine.generate([prompt], free)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 30
    stop = int(whole.token_ids[10])
    first = whole.token_ids.tolist().index(stop)
    (cut,) = engine.generate([prompt], dataclasses.replace(free, stop_token_ids=(stop,)))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids.tolist() == whole.token_ids[: first + 1].tolist(), "the stop token itself is kept"
    assert cut.logprobs.tobytes() == whole.logprobs[: first + 1].tobytes()
    assert cut.text == Letters().decode(whole.token_ids[:first])
    eos = tiny.engine(cfg=dataclasses.replace(tiny.CONFIG, eos_token_ids=(299, stop)))
    (ended,) = eos.generate([prompt], free)
    assert ended.token_ids.tolist() == cut.token_ids.tolist()
    (ignored,) = eos.generate([prompt], dataclasses.replace(free, ignore_eos=True))
    assert ignored.token_ids.tolist() == whole.token_ids.tolist()


def test_more_stop_tokens_than_the_device_looks_at(engine):
    prompt = tiny.prompts(1, seed=3)[0]
    free = SamplingParams(seed=2, max_tokens=30, temperature=1.3)
    (whole,) = engine.generate([prompt], free)
    absent = sorted(set(range(300)) - set(whole.token_ids.tolist()))
    stop = max(whole.token_ids.tolist())
    stops = (*[t for t in absent if t < stop][:20], stop)
    assert len(stops) == 21
    (cut,) = engine.generate([prompt], dataclasses.replace(free, stop_token_ids=stops))
    assert cut.token_ids.tolist() == whole.token_ids[: whole.token_ids.tolist().index(stop) + 1].tolist()


def test_stop_strings(engine):
    prompt = tiny.prompts(1, seed=3)[0]
    free = SamplingParams(seed=2, max_tokens=30, temperature=1.3)
    (whole,) = engine.generate([prompt], free)
    stop = Letters().decode(whole.token_ids[9:11])[1:3]  # the end of one token and the beginning of the next
    ends = next(n for n in range(1, 31) if stop in Letters().decode(whole.token_ids[:n]))
    (cut,) = engine.generate([prompt], dataclasses.replace(free, stop=("never", stop)))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids.tolist() == whole.token_ids[:ends].tolist()
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_max_model_len_ends_a_completion(engine):
    long = tiny.prompts(1, low=250, high=250)[0]
    (c,) = engine.generate([long], SamplingParams(max_tokens=100))
    assert c.finish_reason == "length" and len(c.token_ids) == 6
    (c,) = engine.generate([long[:100]])
    assert len(c.token_ids) == 156, "max_tokens None means up to max_model_len"
    (c,) = engine.generate([np.append(long, long[:5])])
    assert len(c.token_ids) == 1


def test_what_a_completion_holds(engine):
    (c, d) = engine.generate(["abc"], SamplingParams(n=2, seed=9, temperature=0.7, max_tokens=5))
    assert (c.index, d.index) == (0, 1) and c.request_id == d.request_id and c.seed == 9
    assert c.prompt_ids.tolist() == [97, 98, 99] and c.text == Letters().decode(c.token_ids)
    assert c.token_ids.dtype == c.versions.dtype == np.int32 and c.logprobs.dtype == np.float32
    assert len(c.token_ids) == len(c.logprobs) == len(c.truncated_logprobs) == len(c.versions) == len(c.logits) == 5
    assert c.inv_temp == np.float32(1) / np.float32(0.7) and isinstance(c.inv_temp, np.float32)
    as_json = c.to_json()
    assert np.float32(as_json["logprobs"]).tobytes() == c.logprobs.tobytes() and "logits" not in as_json
    (quiet,) = engine.generate([[1]], SamplingParams(logprobs=False, max_tokens=2))
    assert quiet.logprobs is None and quiet.truncated_logprobs is None and "logprobs" not in quiet.to_json()


def test_requests_beside_generate_are_returned_by_the_next_step(engine):
    engine.add_request([5, 6, 7], dataclasses.replace(GREEDY, max_tokens=2), "beside")
    (mine,) = engine.generate([[1, 2]], GREEDY)
    assert mine.request_id != "beside"
    assert [c.request_id for c in drain(engine)] == ["beside"]


def test_an_interrupted_generate_leaves_the_engine_usable(engine):
    prompts = tiny.prompts(12)
    result, calls = engine._runner.result, []

    def interrupted(running):
        calls.append(running)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return result(running)

    engine._runner.result = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, GREEDY)
    finally:
        del engine._runner.result
    engine.check()
    assert not engine.has_work and engine.stats().pages_in_use == 0
    tiny.assert_same_bits(engine.generate(prompts[:1], GREEDY), [tiny.alone(prompts[0], GREEDY)])


def test_weights_that_do_not_fit_change_nothing(engine):
    weights = tiny.params(1)
    wrong = {**weights, "embed": weights["embed"][:, :32], "extra": weights["embed"]}
    del wrong["final_norm"]
    with pytest.raises(ValueError) as e:
        engine.update_weights(wrong, 1)
    assert all(part in str(e.value) for part in ("missing final_norm", "unknown extra", "embed is bfloat16 (300, 32)"))
    with pytest.raises(ValueError, match="version=0 must be above the present version 0"):
        engine.update_weights(weights, 0)
    with pytest.raises(ValueError, match="on_update='later'"):
        engine.update_weights(weights, 1, on_update="later")
    assert engine.version == 0
    tiny.assert_same_bits(engine.generate([[1, 2]], GREEDY), [tiny.alone(np.array([1, 2]), GREEDY)])


@contextlib.contextmanager
def counting_compilations():
    """A list that grows by one with every XLA compilation."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_the_start():
    # A pool size that no other test has: its programs are not compiled yet, but for scoring, which is of any pool.
    programs.compiled_score.cache_clear()
    engine, others = tiny.engine(num_pages=61, seq_buckets=(2, 8), prompt_logprobs=True), tiny.params(1)
    with counting_compilations() as compiled:
        assert engine.warmup() == len(compiled) == 5
        del compiled[:]
        prompts = tiny.prompts(9)
        sampling = tiny.seeded(9, n=3)
        engine.generate(prompts, [dataclasses.replace(s, prompt_logprobs=i % 2 == 0) for i, s in enumerate(sampling)])
        engine.generate(prompts[:1], sampling[0])
        for p, s in zip(prompts, sampling, strict=True):
            engine.add_request(p, s)
        engine.step()
        engine.abort("0")
        engine.update_weights(others, 1, on_update="continue")
        drain(engine)
        stats = engine.stats()
        assert stats.prefix_hits and stats.copied_pages and stats.dropped
        assert compiled == []
        tiny.engine(num_pages=60, return_logits=False).generate([[1]], GREEDY)
        assert len(compiled) >= 2, "control: an engine that was not warmed up compiles, and the counter sees it"


def sent_ahead(engine) -> list:
    """Grows by the samples, how long they were, and whether they had ended, of each loop that the engine sends to the device behind one
    that still runs."""
    start, seen = engine._runner.start, []

    def noted(plan, after=None):
        if after is not None:
            seen.append([(sample, sample.count, sample.finish_reason) for sample in plan.decode])
        return start(plan, after)

    engine._runner.start = noted
    return seen


def test_loops_sent_ahead_have_the_bits_of_loops_one_by_one():
    prompts = tiny.prompts(6)
    stops = tuple(range(100, 100 + slots.DEVICE_STOPS + 12))  # most of them the host alone knows
    sampling = [SamplingParams(max_tokens=30, seed=i, stop_token_ids=stops if i % 2 else ()) for i in range(6)]
    engine, patient = tiny.engine(), tiny.engine()
    patient._scheduler.follow = lambda plan: None
    ahead = sent_ahead(engine)
    want = patient.generate(prompts, sampling)
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    assert any(c.finish_reason == "stop" for c in want) and ahead
    ended = [
        s for samples in ahead for s, n, _ in samples if s.finish_reason == "stop" and s.count <= n + tiny.ENGINE.decode_steps
    ]
    assert any(s.stop_reason >= stops[slots.DEVICE_STOPS] for s in ended), "the host ended a sample, and the device went on with it"
    engine.check()
    assert engine.stats().pages_in_use == 0


def test_loops_follow_with_the_rows_of_samples_that_have_ended():
    """By length and by a stop token, at different steps; who begins later gets their pages."""
    prompts = tiny.prompts(5)
    first = tiny.engine().generate(prompts, SamplingParams(max_tokens=50, seed=1))
    sampling = [SamplingParams(max_tokens=n, seed=1) for n in (50, 9, 14, 50, 31)]
    sampling[3] = SamplingParams(max_tokens=50, seed=1, stop_token_ids=(int(first[3].token_ids[20]),))
    engine, patient = tiny.engine(seq_buckets=(8,)), tiny.engine(seq_buckets=(8,))
    patient._scheduler.follow = lambda plan: None
    want = patient.generate(prompts, sampling)
    ahead = sent_ahead(engine)
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    assert [c.finish_reason for c in want].count("stop") == 1
    ended = {sum(why is not None for *_, why in samples) for samples in ahead}
    assert ended >= {0, 1, 2, 3, 4}, "with each number of ended samples"
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)
    engine.check()
    assert engine.stats().pages_in_use == 0


@pytest.mark.parametrize("on_update", ["finish", "restart", "continue"])
def test_weights_change_while_a_loop_is_ahead(on_update):
    prompts, sampling, weights = tiny.prompts(3), SamplingParams(max_tokens=30, seed=1), tiny.params(1)
    found = []
    for patient in (False, True):
        engine = tiny.engine()
        if patient:
            engine._scheduler.follow = lambda plan: None
        for i, p in enumerate(prompts):
            engine.add_request(p, sampling, str(i))
        while engine._requests["0"].samples[0].generated < 9:
            engine.step()
        assert (engine._ahead is None) == patient
        engine.update_weights(weights, 1, on_update=on_update)
        found.append(sorted(drain(engine), key=lambda c: c.request_id))
        engine.check()
        assert engine.stats().pages_in_use == 0
    tiny.assert_same_bits(*found)
    versions = [set(c.versions.tolist()) for c in found[0]]
    assert versions == [{"finish": {0}, "restart": {1}, "continue": {0, 1}}[on_update]] * 3


def test_an_abort_while_a_loop_is_ahead_harms_nobody():
    engine = tiny.engine()
    sampling = SamplingParams(max_tokens=30, seed=1)
    for i, p in enumerate(tiny.prompts(2)):
        engine.add_request(p, sampling, str(i))
    while engine._ahead is None:
        engine.step()
    engine.abort("0")
    engine.add_request(tiny.prompts(3)[2], sampling, "2")  # may get the pages of the one that left
    done = {c.request_id: c for c in drain(engine)}
    assert done["0"].finish_reason == "abort"
    for i in (1, 2):
        tiny.assert_same_bits([done[str(i)]], [tiny.alone(tiny.prompts(3)[i], sampling)])
    engine.add_request([1, 2, 3], sampling, "last")
    while engine._ahead is None:
        engine.step()
    engine.abort("last")
    engine.release_pages()
    assert engine._ahead is None and [c.request_id for c in engine.step()] == ["last"] and not engine.has_work


def test_a_clock_bounds_the_steps_between_two_looks():
    ask = SamplingParams(max_tokens=13, seed=5)
    engine, hasty = tiny.engine(), tiny.engine(look_s=1e-9)
    tiny.assert_same_bits(hasty.generate([[1, 2, 3]], ask), engine.generate([[1, 2, 3]], ask))
    first = tiny.ENGINE.decode_steps  # two loops are sent before a step is measured
    assert engine.stats().steps == 1 + 12 // first and hasty.stats().steps == 1 + 2 + (12 - 2 * first)


def test_stats_add_up():
    engine = tiny.engine()
    completions = engine.generate(tiny.prompts(5), SamplingParams(n=2, max_tokens=9))
    stats = engine.stats()
    assert stats.requests == 5 and stats.completions == 10
    assert stats.generated_tokens == sum(len(c.token_ids) for c in completions) == 90
    assert stats.decode_rows == 80, "the first token of each comes from a row of its prompt"
    assert stats.prefill_rows + stats.reused_tokens == 2 * sum(len(p) for p in tiny.prompts(5))
    assert stats.tokens_per_s > 0 and 0 < stats.busy_s and stats.pages_in_use == 0 and stats.pages == 64
    assert 8 <= stats.decode_steps < 80
    engine.generate(tiny.prompts(1), SamplingParams(max_tokens=9))
    assert engine.stats().decode_steps == stats.decode_steps + 8


def test_the_contract_of_an_engine_is_that_of_the_model():
    engine = tiny.engine()
    mine = derive(tiny.CONFIG, tiny.BF16, engine.traces())
    whole = derive(tiny.CONFIG, tiny.BF16, trace_cases(tiny.CONFIG, tiny.BF16))
    for case in ("prefill", "decode"):
        shared = [region for region in mine.entries if case in whole.entries[region]]
        assert len(shared) >= 10
        assert all(mine.entries[region][case] == whole.entries[region][case] for region in shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(page_size=24), "page_size=24 does not divide 128"),
        (dict(max_seqs=0, chunk_tokens=0), "max_seqs=0 .*; chunk_tokens=0 "),
        (dict(num_pages=3, kv_memory=9), "num_pages=3 and kv_memory=9 are given; give one"),
        (dict(look_s=0), "look_s=0 must be above 0"),
        (dict(on_update="later"), "on_update='later'; choose one of finish, restart, continue"),
        (dict(seq_buckets=(4, 2)), "seq_buckets=.* rising order"),
        (dict(max_model_len=1), "no room"),
        (dict(max_model_len=513), "the model has 512 positions"),
        (dict(kv_memory=100), "hold no page of 8192 bytes"),
        (dict(num_pages=2**26), "more than 1073741823 positions"),
    ],
    ids=str,
)
def test_engine_config_faults(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes).resolve(tiny.CONFIG, tiny.BF16.dtype)


def test_default_sizes_follow_the_model():
    config = EngineConfig().resolve(tiny.CONFIG, tiny.BF16.dtype)
    assert config.max_model_len == 512 and config.num_pages == 64 * 32 and config.table_width == 32
    assert config.seq_buckets == (16, 64) and config.token_buckets == (64, 256, 576)
    page_bytes = 2 * 2 * 16 * 2 * 32 * 2
    assert EngineConfig(kv_memory=10 * page_bytes + 1).resolve(tiny.CONFIG, tiny.BF16.dtype).num_pages == 10


def test_completions_compare_by_identity():
    c = Completion("0", 0, *(np.zeros(1),) * 4, np.zeros(1), np.float32(1), "stop", None, 0)
    assert c == c and c != dataclasses.replace(c)
