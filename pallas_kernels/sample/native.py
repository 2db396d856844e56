"""Sampling in native numerics: the reference's own choice. It is exact integer work but for the logits and the log-probability,
which are native's."""

import functools

from pallas_kernels.logprob import native as logprob
from pallas_kernels.sample import reference
from pallas_kernels.sample.reference import entry

sample = functools.partial(reference.sample, reduce=logprob.reduce)

__all__ = ["entry", "sample"]
