"""SamplingParams: faults are named, derived numbers are fixed, seeds are told apart."""

from __future__ import annotations

import numpy as np
import pytest

from isomodel.rollout import SamplingParams
from isomodel.rollout.sampling_params import assigned_seed, sample_key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", 1e-42),
        ("temperature", 9e-4),
        ("temperature", 1e39),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("n", 0),
        ("ignore_eos", 1),
        ("logprobs", None),
    ],
)
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"sampling: {field}="):
        SamplingParams(**{field: value})


def test_all_faults_are_listed_at_once():
    with pytest.raises(ValueError) as e:
        SamplingParams(temperature=-1, top_p=2, n=0)
    assert all(field in str(e.value) for field in ("temperature=-1", "top_p=2", "n=0"))


def test_inverse_temperature_is_one_float32():
    params = SamplingParams(temperature=0.7)
    assert params.inv_temp.dtype == np.float32 and params.inv_temp == params.sampler_inv_temp
    assert params.inv_temp.view(np.uint32) == (np.float32(1) / np.float32(0.7)).view(np.uint32)
    greedy = SamplingParams(temperature=0)
    assert greedy.greedy and greedy.inv_temp == 1 and greedy.sampler_inv_temp == 0


def test_one_stop_string_may_come_without_a_list():
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_keys_tell_seed_and_sample_apart():
    keys = {tuple(sample_key(seed, index)) for seed in (0, 5, 5 + 7 * 2**32, 7 * 2**32) for index in range(8)}
    assert len(keys) == 32, "as plain entropy, (5, 7) and (5 + 7 * 2**32, 0) would be one"
    assert sample_key(5, 3).dtype == np.uint32 and sample_key(5, 3).tolist() == sample_key(5, 3).tolist()


def test_assigned_seeds_are_fixed_and_fit_a_double():
    seeds = [assigned_seed(engine, counter) for engine in (0, 1) for counter in range(50)]
    assert len(set(seeds)) == 100 and max(seeds) < 2**53
    assert assigned_seed(0, 0) == seeds[0]
