"""Scheduler: the right rows on the right pages, whatever happens, shown with a runner whose pages hold token ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isomodel.rollout.sampling_params import SamplingParams
from isomodel.rollout.sequence import Request
from isomodel.rollout.slots import DEVICE_STOPS
from tests.isomodel.rollout.fake_runner import drain, expected, make, step


def request(name, prompt, n=1, new=8, stops=()):
    params = SamplingParams(seed=len(name), n=n, max_tokens=new)
    prompt = np.asarray(prompt, np.int32)
    return Request(name, prompt, params, params.seed, len(prompt) + new, frozenset(stops))


def assert_as_alone(requests):
    for r in requests:
        for sample in r.samples:
            tokens = sample.tokens[len(r.prompt) : sample.count].tolist()
            assert tokens == expected(r, sample.index), f"{r.id}/{sample.index}"
            assert sample.finish_reason == ("stop" if tokens[-1] in r.stop_ids else "length")


def assert_no_leak(scheduler):
    scheduler.check()
    assert scheduler.pool.available == scheduler.pool.num_pages
    assert len(scheduler.slots) == scheduler.slots.page_table_MP.shape[0]


def test_one_request():
    scheduler, runner = make()
    r = request("a", range(10))
    scheduler.add(r)
    assert drain(scheduler, runner) == r.samples
    assert_as_alone([r])
    assert_no_leak(scheduler)


def test_admission_is_first_come_first_served_and_chunks_go_to_the_oldest_first():
    scheduler, _ = make(chunk_tokens=8, max_seqs=3)
    requests = [request(str(i), range(i, i + 6)) for i in range(4)]
    for r in requests:
        scheduler.add(r)
    plan = scheduler.schedule()
    assert [(c.sample.request.id, c.start, c.count) for c in plan.chunks] == [("0", 0, 6), ("1", 0, 2)]
    assert [s.request.id for s in scheduler.waiting] == ["2", "3"]


def test_decodes_and_chunks_share_a_step():
    scheduler, runner = make(chunk_tokens=4)
    a, b = request("a", range(4), new=12), request("bb", range(20, 30))
    scheduler.add(a)
    step(scheduler, runner)
    scheduler.add(b)
    plan = scheduler.schedule()
    assert [s.request.id for s in plan.decode] == ["a"] and [c.sample.request.id for c in plan.chunks] == ["bb"]
    scheduler.update(plan, runner.run(plan))
    drain(scheduler, runner)
    assert_as_alone([a, b])


def test_the_decode_loop_takes_many_steps_and_stops_where_a_sample_stops():
    scheduler, runner = make(decode_steps=8)
    probe = request("a", range(5), new=30)
    stop = expected(probe, 0)[12]
    r = request("a", range(5), new=30, stops=[stop])
    scheduler.add(r)
    step(scheduler, runner)
    plan = scheduler.schedule()
    assert plan.steps == 8
    scheduler.update(plan, runner.run(plan))
    drain(scheduler, runner)
    assert_as_alone([r])
    assert r.samples[0].stop_reason == stop and r.samples[0].generated < 30
    assert_no_leak(scheduler)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_samples_of_one_prompt_share_its_pages(prompt_len, prefix_cache):
    scheduler, runner = make(prefix_cache=prefix_cache, max_seqs=3)
    r = request("group", range(prompt_len), n=7)
    scheduler.add(r)
    drain(scheduler, runner)
    assert_as_alone([r])
    assert len({tuple(s.tokens.tolist()) for s in r.samples}) == 7, "the samples have keys of their own"
    assert scheduler.stats.prefill_rows == prompt_len + 6, "one row for each sample that forks"
    assert scheduler.stats.copied_pages == (6 if prompt_len % 4 else 0)
    assert scheduler.stats.shared_pages == 6 * (prompt_len // 4)
    assert_no_leak(scheduler)


def test_a_later_request_finds_the_pages_of_an_earlier_one():
    for cache in (True, False):
        scheduler, runner = make(prefix_cache=cache)
        first, second, whole = (
            request("a", range(13)),
            request("bb", list(range(12)) + [40, 41]),
            request("ccc", range(12)),
        )
        for r in (first, second, whole):
            scheduler.add(r)
            drain(scheduler, runner)
        assert_as_alone([first, second, whole])
        assert scheduler.pool.stats.hits == (6 if cache else 0)
        assert scheduler.stats.prefill_rows == (13 + 2 + 1 if cache else 13 + 14 + 12)
        assert_no_leak(scheduler)


def test_preempted_samples_come_back():
    scheduler, runner = make(num_pages=9, prefix_cache=False)
    requests = [request("x" * i, range(i, i + 6), new=14) for i in range(1, 5)]
    for r in requests:
        scheduler.add(r)
    drain(scheduler, runner)
    assert scheduler.stats.preemptions > 0
    assert_as_alone(requests)
    assert_no_leak(scheduler)


def test_a_sample_that_resumes_with_all_but_its_newest_token_cached():
    scheduler, runner = make()
    r = request("a", range(6), new=14)
    scheduler.add(r)
    sample = r.samples[0]
    scheduler.decode_steps = 1
    while sample.count != 13:
        step(scheduler, runner)
    runner.ahead = None
    scheduler._preempt(sample)
    plan = scheduler.schedule()
    assert sample.computed == 12 and [(c.start, c.count) for c in plan.chunks] == [(12, 1)]
    scheduler.update(plan, runner.run(plan))
    drain(scheduler, runner)
    assert_as_alone([r])
    assert_no_leak(scheduler)


def test_the_oldest_sample_is_never_preempted():
    scheduler, runner = make(num_pages=9)
    requests = [request("x" * i, range(i, i + 6), new=14) for i in range(1, 5)]
    for r in requests:
        scheduler.add(r)
    oldest = requests[0].samples[0]
    while not oldest.finish_reason:
        step(scheduler, runner)
        assert oldest.finish_reason or oldest.attached


def test_aborting_one_request_leaves_the_others_alone():
    scheduler, runner = make(max_seqs=4)
    requests = [request("x" * i, range(i, i + 9), n=3, new=12) for i in range(1, 4)]
    for r in requests:
        scheduler.add(r)
    step(scheduler, runner)
    step(scheduler, runner)
    aborted = scheduler.abort(requests[0])
    assert len(aborted) == 3 and all(s.finish_reason == "abort" for s in aborted)
    scheduler.check()
    drain(scheduler, runner)
    assert_as_alone(requests[1:])
    assert_no_leak(scheduler)


@pytest.mark.parametrize("keep", [False, True])
def test_new_weights_drop_every_page_and_hold(keep):
    scheduler, runner = make(max_seqs=2)
    r, later = request("a", range(9), n=5, new=12), request("bb", range(9))
    scheduler.add(r)
    for _ in range(4):
        step(scheduler, runner)
    generated = [s.generated for s in r.samples]
    assert max(generated) > 0 and scheduler.pool.cached > 0 and r.held is not None
    runner.ahead = None
    assert scheduler.change_weights(1, keep_tokens=keep) > 0
    assert scheduler.pool.available == scheduler.pool.num_pages and not scheduler.pool.cached and r.held is None
    assert [s.generated for s in r.samples] == (generated if keep else [0] * 5)
    runner.store[:] = -1  # nothing of the old pages may be read
    hits = scheduler.pool.stats.hits
    scheduler.add(later)
    drain(scheduler, runner)
    assert scheduler.pool.stats.hits > hits, "pages of the new weights are cached again"
    assert_as_alone([r, later])
    versions = {int(v) for s in r.samples for v in s.versions[: s.generated]}
    assert versions == ({0, 1} if keep else {1})
    assert_no_leak(scheduler)


def test_the_version_in_the_key_is_what_keeps_stale_pages_out(monkeypatch):
    """Control: without the version in the key and without dropping, a stale page is found and the tokens go wrong."""
    from isomodel.rollout import pages

    def stale(scheduler, runner):
        first, second = request("a", range(13)), request("a", range(13))
        scheduler.add(first)
        drain(scheduler, runner)
        scheduler.pool.drop_cached = lambda: 0
        scheduler.change_weights(1, keep_tokens=False)
        runner.store[:] = -1
        scheduler.add(second)
        drain(scheduler, runner)
        return second

    assert_as_alone([stale(*make())])  # the version alone is enough
    monkeypatch.setattr(pages, "root_key", lambda version: b"same")
    with pytest.raises(AssertionError):
        assert_as_alone([stale(*make())])


@pytest.mark.parametrize("num_pages", [200, 14])
def test_samples_of_two_versions_take_turns_and_share_no_page(num_pages):
    """Of five requests two have begun when new weights come, one of them with a sample that waits; one prompt is everybody's."""
    scheduler, runner = make(max_seqs=4, num_pages=num_pages)
    requests = [request("x" * i, range(6), n=2 + (i == 2), new=16) for i in range(1, 6)]
    for r in requests:
        scheduler.add(r)
    for _ in range(3):
        step(scheduler, runner)
    assert {r.version for r in requests} == {0, None}
    scheduler.begin_version(5)
    turns = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        turns.append((plan.version, scheduler.finishing))
        scheduler.update(plan, runner.run(plan))  # which looks at whose pages are read
        scheduler.check()
    assert_as_alone(requests)
    assert_no_leak(scheduler)
    assert {r.version for r in requests} == {0, 5} and requests[0].version == 0 and requests[-1].version == 5
    beside = [version for version, finishing in turns if finishing]
    assert {0, 5} == set(beside) or num_pages < 200  # with few pages the old ones may need all
    assert turns[-1] == (5, False) and all(version == 5 for version, finishing in turns if not finishing)


def test_control_a_page_of_other_weights_is_seen(monkeypatch):
    from isomodel.rollout import pages

    scheduler, runner = make()
    monkeypatch.setattr(pages, "root_key", lambda version: b"same")
    monkeypatch.setattr(scheduler.pool, "drop_cached", lambda: 0)
    for i in range(2):
        scheduler.add(request("a" * (i + 1), range(11)))
        if i:
            with pytest.raises(AssertionError, match="other weights"):
                drain(scheduler, runner)
        else:
            drain(scheduler, runner)
        scheduler.begin_version(i + 1)


def test_a_leader_that_is_preempted_in_its_prompt_begins_again():
    scheduler, runner = make(chunk_tokens=4, prefix_cache=False)
    r = request("a", range(11), n=3)
    scheduler.add(r)
    step(scheduler, runner)
    assert r.leader is r.samples[0] and r.leader.computed == 4
    scheduler._preempt(r.leader)
    assert r.leader is None
    drain(scheduler, runner)
    assert scheduler.stats.prefill_rows == 4 + 11 + 2
    assert_as_alone([r])
    assert_no_leak(scheduler)


def test_held_prompt_pages_give_way_when_nothing_else_can():
    """Two prompts' pages are held for later samples, and the pool is too small for both and one more sample."""
    scheduler, runner = make(num_pages=7, max_seqs=2, prefix_cache=False)
    a, b = request("a", range(11), n=4, new=12), request("bb", range(20, 31), n=4, new=12)
    scheduler.add(a)
    scheduler.add(b)
    drain(scheduler, runner)
    assert_as_alone([a, b])
    assert_no_leak(scheduler)


WORK = st.tuples(
    st.integers(1, 14),  # prompt length
    st.integers(0, 2),  # family of prompts: equal prefixes
    st.integers(1, 5),  # n
    st.integers(1, 12),  # new tokens
    st.integers(0, 6),  # step at which it arrives
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    work=st.lists(WORK, min_size=1, max_size=7),
    pages=st.integers(7, 24),
    chunk=st.integers(1, 20),
    steps=st.sampled_from([1, 3, 8]),
    seqs=st.integers(1, 6),
    cache=st.booleans(),
    buckets=st.sampled_from([(), (2, 6), (6,)]),
    events=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["abort", "restart", "keep"])), max_size=3),
)
def test_random_work_under_pressure(work, pages, chunk, steps, seqs, cache, buckets, events):
    sizes = dict(num_pages=pages, chunk_tokens=chunk, decode_steps=steps, max_seqs=seqs, seq_buckets=buckets)
    scheduler, runner = make(prefix_cache=cache, **sizes)
    requests, aborted, now = [], set(), 0
    arrivals = {}
    for i, (length, family, n, new, at) in enumerate(work):
        r = request("x" * i, np.arange(length) + 10 * family, n=n, new=new, stops=[3])
        requests.append(r)
        arrivals.setdefault(at, []).append(r)
    last = max(arrivals)
    while now <= last or scheduler.has_work:
        assert now < 3000, "no progress"
        for r in arrivals.get(now, []):
            scheduler.add(r)
        for at, event in events:
            if at != now:
                continue
            if event == "abort":
                live = [r for r in requests if r.id not in aborted and any(s.slot >= 0 for s in r.samples)]
                if live:
                    scheduler.abort(live[0])
                    aborted.add(live[0].id)
            else:
                runner.ahead = None
                scheduler.change_weights(scheduler.version + 1, keep_tokens=event == "keep")
                runner.store[:] = -1
        step(scheduler, runner)
        now += 1
    assert_as_alone([r for r in requests if r.id not in aborted])
    assert_no_leak(scheduler)


def test_a_loop_follows_before_the_one_that_runs_is_taken_in():
    scheduler, runner = make(decode_steps=3)
    a, b = request("a", range(5), new=16), request("b", range(20, 26), new=30, stops=[3])
    scheduler.add(a), scheduler.add(b)
    step(scheduler, runner)
    plan = scheduler.schedule()
    result = runner.run(plan)
    following = scheduler.follow(plan)
    assert following.decode == plan.decode and following.steps == 3 and following.version == plan.version
    scheduler.check()
    assert all(len(s.pages) >= scheduler.pool.pages_for(s.count + 5) for s in plan.decode)  # both loops' pages are there
    runner.ahead = following, runner.run(following, follows=True)
    scheduler.update(plan, result)
    drain(scheduler, runner)
    assert runner.followed > 2
    assert_as_alone([a, b])
    assert_no_leak(scheduler)


@pytest.mark.parametrize("buckets, follows", [((4,), True), ((2, 4), True), ((1, 2, 4), False), ((), False)])
def test_a_loop_follows_with_the_rows_of_ended_samples_where_as_many_rows_run(buckets, follows):
    scheduler, runner = make(decode_steps=3, seq_buckets=buckets)
    a, b = request("a", range(5), new=5), request("b", range(20, 26), new=40)
    scheduler.add(a), scheduler.add(b)
    step(scheduler, runner)
    while a.samples[0].finish_reason is None:
        step(scheduler, runner)
    plan, result = runner.ahead
    assert len(plan.decode) == 2 and result.counts_S[1] == 3
    following = scheduler.follow(plan)
    assert (following is not None) == follows
    if follows:
        assert following.decode == plan.decode and following.slots.tolist() == [-1, b.samples[0].slot]
        before = runner.followed
        drain(scheduler, runner)
        assert runner.followed > before + 5
    drain(scheduler, runner)
    assert_as_alone([a, b])
    assert_no_leak(scheduler)


def test_nothing_follows_a_sample_that_ended_without_the_device():
    """Its row writes to pages that may be somebody else's by now."""
    stops = range(100, 100 + DEVICE_STOPS + 1)
    for reason, stop in (("stop", "word"), ("stop", max(stops)), ("abort", None), ("error", None)):
        scheduler, runner = make(decode_steps=3, seq_buckets=(8,))
        a, b = request("a", range(5), new=30, stops=stops), request("b", range(20, 26), new=40)
        scheduler.add(a), scheduler.add(b)
        step(scheduler, runner), step(scheduler, runner)
        plan, _ = runner.ahead
        assert scheduler.follow(plan)
        sample = a.samples[0]
        sample.finish_reason, sample.stop_reason = reason, stop
        scheduler.running.remove(sample)
        assert scheduler.follow(plan) is None
        sample.finish_reason, sample.stop_reason = "stop", min(stops)
        assert scheduler.follow(plan), "the control"


def test_nothing_follows_where_others_want_a_turn_or_a_sample_has_ended():
    scheduler, runner = make(decode_steps=3, max_seqs=2, num_pages=12)
    a, b = request("a", range(5), new=9), request("b", range(20, 25), new=40)
    scheduler.add(a), scheduler.add(b)
    prefill = scheduler.schedule()
    assert scheduler.follow(prefill) is None  # its rows are a prompt's
    scheduler.update(prefill, runner.run(prefill))
    plan = scheduler.schedule()
    free = scheduler.pool.allocate(scheduler.pool.available)
    assert scheduler.follow(plan) is None  # no page is left for 6 steps
    scheduler.pool.release(free)
    waits = request("c", range(3))
    scheduler.add(waits)
    assert scheduler.follow(plan) is None  # somebody wants to be admitted
    scheduler.abort(waits)
    following = scheduler.follow(plan)
    results = runner.run(plan), runner.run(following, follows=True)
    scheduler.update(plan, results[0])
    scheduler.abort(a)
    assert scheduler.follow(following) is None  # its rows are not those of samples that run
    count = a.samples[0].count
    assert scheduler.update(following, results[1]) == [] and a.samples[0].count == count
    drain(scheduler, runner)
    assert_as_alone([b])
    assert_no_leak(scheduler)


def test_looks_are_sooner_where_others_wait_for_room():
    """Of three samples with 2, 30 and 30 tokens to come, the first idles after 2 steps: nobody minds, until one waits."""
    scheduler, runner = make(max_seqs=3, decode_steps=30)
    for name, new in (("a", 3), ("bb", 31), ("ccc", 31)):
        scheduler.add(request(name, range(4), new=new))
    step(scheduler, runner)
    assert scheduler.schedule().steps == 30
    scheduler.add(request("dddd", range(4)))
    steps = scheduler.schedule().steps
    assert steps == 2, "idle rows of 3 steps: 1 of 9, more than a sixteenth"
    scheduler.most_steps = 1
    assert scheduler.schedule().steps == 1


def test_looks_are_sooner_where_tokens_end_samples():
    scheduler, runner = make(max_seqs=4, decode_steps=16, num_pages=200, chunk_tokens=64)
    stop = expected(request("a", range(5), new=40), 0)[6]
    for name in "abc":  # names of one length: one seed, and one stop
        scheduler.add(request(name, range(5), new=40, stops=[stop]))
    for name in ("long", "waits", "waits too", "waits, too", "waits as well"):
        scheduler.add(request(name, range(7), new=60))
    step(scheduler, runner)
    assert scheduler.schedule().steps == 16
    assert [s.request.id for s in step(scheduler, runner)] == ["a", "b", "c"]
    step(scheduler, runner)  # prompts of three that waited
    assert len(scheduler.running) == 4 and len(scheduler.waiting) == 1
    assert scheduler.schedule().steps == 7  # 3 stops in 16 steps of late
    drain(scheduler, runner)
    assert_no_leak(scheduler)
