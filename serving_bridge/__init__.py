"""The bridge to vLLM: the same compiled kernels in PyTorch, and the comparison (not built yet: see docs/architecture.md)."""
