"""Sampling in native numerics: the reference's own. It is exact integer work but for the logits, which are native's."""

from pallas_kernels.sample.reference import entry, sample

__all__ = ["entry", "sample"]
