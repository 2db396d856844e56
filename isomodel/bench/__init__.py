"""`isomodel bench`: how fast the engine is, beside vLLM on the same work and the same GPU."""

from isomodel.bench.command import add_commands

__all__ = ["add_commands"]
