"""What the engine samples: the right distribution, the right support, and tokens that a seed alone fixes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from isomodel.rollout import SamplingParams
from isomodel.rollout.sampling_params import assigned_seed
from tests.isomodel.rollout import tiny

SMALL = dataclasses.replace(tiny.CONFIG, vocab_size=24)
PROMPT = tiny.prompts(1, seed=5, low=6, high=6, vocab=24)[0]
DRAWS = 1500


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(cfg=SMALL, max_seqs=64, seq_buckets=(64,), token_buckets=(64, 128))


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    return p / p.sum()


def kept(p: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Which tokens survive, in the order of the contract: top-k, then top-p over the renormalised rest, then min-p."""
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: top_k or len(p)]] = True
    q = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(q[order]) - q[order]
    keep[order[before >= top_p]] = False
    return keep & (p >= min_p * p.max())


def draw(engine, n=DRAWS, seed=17, **params):
    completions = engine.generate([PROMPT], SamplingParams(n=n, seed=seed, max_tokens=1, **params))
    return completions[0].logits[0], np.array([c.token_ids[0] for c in completions]), completions


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_fit_the_distribution(engine, temperature):
    logits, tokens, _ = draw(engine, temperature=temperature)
    p = probabilities(logits, temperature)
    assert p.max() < 0.9 and (p * DRAWS > 5).sum() > 5, "the model's distribution is neither a point nor flat"
    assert _fit(tokens, p) > 1e-3
    wrong = probabilities(logits, temperature * 1.3)
    assert _fit(tokens, wrong) < 1e-6, "control: the test sees a wrong temperature"


def _fit(tokens: np.ndarray, p: np.ndarray) -> float:
    """p-value of Pearson's chi-square test; rare tokens share a bin."""
    counts = np.bincount(tokens, minlength=len(p))
    often = p * len(tokens) >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(p[often], p[~often].sum()) * len(tokens)
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(
    "truncation",
    [dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1), dict(top_k=10, top_p=0.9, min_p=0.05), dict(top_k=1)],
    ids=str,
)
def test_truncation_keeps_the_right_tokens(engine, truncation):
    logits, tokens, completions = draw(engine, temperature=1.3, **truncation)
    p = probabilities(logits, 1.3)
    keep = kept(p, **truncation)
    assert 0 < keep.sum() < len(p)
    q = np.where(keep, p, 0) / p[keep].sum()
    assert set(tokens) <= set(np.flatnonzero(keep)) and set(np.flatnonzero(q > 0.01)) <= set(tokens)
    if keep.sum() > 1:
        assert _fit(tokens, q) > 1e-3
        assert any(t not in np.flatnonzero(keep) for t in draw(engine, temperature=1.3)[1]), "without it, others come"
    for c in completions[:50]:
        token = c.token_ids[0]
        assert abs(c.truncated_logprobs[0] - np.log(q[token])) < 1e-4
        assert abs(c.logprobs[0] - np.log(p[token])) < 1e-4, "log-probabilities are those before truncation"


def test_greedy_takes_the_largest_logit(engine):
    prompts = tiny.prompts(20, seed=6, low=3, high=20, vocab=24)
    for c in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
        assert c.token_ids.tolist() == c.logits.argmax(axis=1).tolist()
        assert c.inv_temp == 1 and not c.truncated_logprobs.any()
        p = np.array([probabilities(row, 1.0)[t] for row, t in zip(c.logits, c.token_ids, strict=True)])
        assert np.abs(c.logprobs - np.log(p)).max() < 1e-4, "log-probabilities are at temperature 1"


def test_a_seed_fixes_the_tokens(engine):
    prompts = tiny.prompts(6, seed=7, low=3, high=20, vocab=24)
    one = SamplingParams(seed=1, max_tokens=10)
    first = engine.generate(prompts, one)
    again = engine.generate(prompts[::-1], one)[::-1]
    tiny.assert_same_bits(again, first)
    other = engine.generate(prompts, dataclasses.replace(one, seed=2))
    assert all(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first, other, strict=True))
    # A prompt's first sample is the same whether or not there are more.
    many = engine.generate(prompts, dataclasses.replace(one, n=3))
    tiny.assert_same_bits(many[::3], first)


def test_a_request_without_a_seed_gets_one_that_reproduces_it(engine):
    first = engine.generate([PROMPT] * 3, SamplingParams(max_tokens=10))
    assert len({c.seed for c in first}) == 3 and len({c.token_ids.tobytes() for c in first}) == 3
    again = engine.generate([PROMPT] * 3, [SamplingParams(max_tokens=10, seed=c.seed) for c in first])
    tiny.assert_same_bits(again, first)
    twin = tiny.engine(cfg=SMALL, max_seqs=64, seq_buckets=(64,), token_buckets=(64, 128))
    same = twin.generate([PROMPT] * 3, SamplingParams(max_tokens=1))
    assert [c.seed for c in same] == [assigned_seed(twin.config.seed, i) for i in range(3)]
