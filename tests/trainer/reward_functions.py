"""Reward functions that test_rewards names as "module:function"; some misbehave on purpose."""

from __future__ import annotations

import os
import signal
import time

import numpy as np


def length(item, completion, *, scale=1.0):
    return scale * len(completion)


def with_facts(item, completion, finish_reason, num_tokens, bonus=0):
    return num_tokens + bonus + (100 if finish_reason == "length" else 0)


def returns(item, completion):
    return {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1",
        "list": [1.0],
        "array": np.ones(2),
        "true": True,
        "fp32": np.float32(0.5),
        "zero_dim": np.array(0.25),
    }[completion]


def misbehaves(item, completion):
    if completion == "slow":
        while True:
            try:
                time.sleep(30)
            except Exception:  # as careless code does
                pass
    if completion == "deaf":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(30)
    if completion == "dies":
        os._exit(3)
    if completion == "raises":
        raise KeyError("answer")
    return 1.0


NOT_A_FUNCTION = 3
