"""Why a kernel's figure is short of its target, by result id; report.record asks for one where a target is missed."""

_FEW_64 = (
    "At 64 tokens each program reads as much of x from the L2 cache as of its weight from memory (1 token: 10.5 us, 64: 11.9 us, "
    "at the copy's rate 8.2 us), and a launch costs 2 us: XLA's command buffers make each kernel a graph of its own, so that none "
    "starts before the last one's end (without command buffers 11.4 us; with weights loaded before the wait for x 11.2 us). "
    "Wider tiles, x shared by a cluster, and four programs a tile took longer."
)
_TREE_256 = (
    "A tile of 128 x 128 with half of the leaves in each of two programs reads from the L2 cache at its limit (403 MB in 40 us for "
    "4096 x 12288). The library shares these loads in clusters of two; here the exchange of the halves takes the cluster up, and 32 "
    "clusters of four do not find their SMs side by side. Halves added by a kernel of their own took 1 us more at 4096 x 4096."
)

REASONS: dict[str, str] = {
    "gemm-64-tokens-4096x4096": _FEW_64,
    "gemm-64-tokens-6144x4096": _FEW_64,
    "gemm-kernel-64-tokens-o": _FEW_64,
    "gemm-kernel-64-tokens-qkv": _FEW_64,
    "gemm-kernel-256-tokens-gate_up": "Both run at the tensor cores' rate under the GPU's power limit, 51.5 GFLOP in about 70 us.",
    "gemm-256-tokens-4096x4096": _TREE_256,
    "gemm-256-tokens-12288x4096": _TREE_256,
    "gemm-256-tokens-24576x4096": _TREE_256,
    "gemm-kernel-256-tokens-down": _TREE_256,
}
