"""The embedding's gradient by XLA: the same expression, under XLA's own flags (atomics, on a GPU)."""

from pallas_kernels.embed.reference import embed_backward as embed_backward
