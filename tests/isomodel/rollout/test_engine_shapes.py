"""Sizes that a user picks reach no bit: page size, length of the decode loop; and what other numerics do."""

from __future__ import annotations

import pytest

from isomodel.numerics import Numerics
from tests.isomodel.rollout import tiny


@pytest.fixture(scope="module")
def work():
    return tiny.work()


@pytest.mark.parametrize("page_size", [32, 128])
def test_page_size_does_not_reach_the_bits(work, page_size):
    prompts, sampling, want = work
    engine = tiny.engine(page_size=page_size, num_pages=1024 // page_size)
    got = engine.generate(prompts[4:], sampling[4:])
    tiny.assert_same_bits(got, want[4:])
    assert engine.config.table_width == 256 // page_size


@pytest.mark.parametrize("steps", [1, 16])
def test_length_of_the_decode_loop_does_not_reach_the_bits(work, steps):
    prompts, sampling, want = work
    engine = tiny.engine(decode_steps=steps)
    tiny.assert_same_bits(engine.generate(prompts, sampling), want)


@pytest.mark.parametrize("mode", ["iso", "native"])
def test_fp32_compute_and_the_control_that_native_numerics_do_not_keep_bits(work, mode):
    prompts, sampling, _ = work
    numerics = Numerics(mode=mode, compute_dtype="float32")
    together = tiny.engine(numerics=numerics).generate(prompts, sampling)
    apart = tiny.engine(numerics=numerics, prefix_cache=False)
    alone = [apart.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    scores = [tiny.score_as_trainer(tiny.params(numerics=numerics), c, numerics) for c in together]
    differ = sum(tiny.bits(a) != tiny.bits(b) for a, b in zip(together, alone, strict=True))
    off = sum(s.tobytes() != c.logprobs.tobytes() for s, c in zip(scores, together, strict=True))
    assert (differ, off) == (0, 0) if mode == "iso" else min(differ, off) > 0
