"""Why a kernel's figure is short of its target, by result id; report.record asks for one where a target is missed."""

_FEW_64 = (
    "Each program reads as much of x from the L2 cache as of its weight from memory, which we think is what 64 tokens cost (1 token: 10.5 us, 64: 11.9 us, "
    "at the copy's rate 8.2 us), and a launch costs 2 us: XLA's command buffers make each kernel a graph of its own, so that none "
    "starts before the last one's end (without command buffers 11.4 us; with weights loaded before the wait for x 11.2 us). "
    "Wider tiles, x shared by a cluster, and four programs a tile took longer."
)
_TREE_256 = (
    "A tile of 128 x 128 with half of the leaves in each of two programs is held, we think, by reads from the L2 cache (403 MB in "
    "40 us for 4096 x 12288). The library shares these loads in clusters of two; here the exchange of the halves takes the cluster up, and 32 "
    "clusters of four do not find their SMs side by side. Halves added by a kernel of their own took 1 us more at 4096 x 4096."
)

REASONS: dict[str, str] = {
    "gemm-chain-8192x8192x8192": (
        "The worse of two settings of XLA's flags, while both sides are held by the GPU's power limit (clocks move between 1.6 and "
        "1.98 GHz within a run): 1.02 in a run of pairs in turn, 1.06 in an earlier one, with the same inner loop in SASS."
    ),
    "gemm-tree-16384x4096x4096": (
        "Not understood: 0.96 in pairs with cuBLAS in turn when this schedule (tiles of 128 x 112, the whole tree in registers) was "
        "chosen, 0.85 here under XLA's default flags. 128 x 128 with half the tree in shared memory had 0.93 in the same pairs; tiles "
        "of 128 x 96, clusters and shorter rings were slower, and 3 % of a leaf's time are its additions."
    ),
    "gemm-64-tokens-4096x4096": _FEW_64,
    "gemm-64-tokens-6144x4096": _FEW_64,
    "gemm-kernel-64-tokens-o": _FEW_64,
    "gemm-kernel-64-tokens-qkv": _FEW_64,
    "gemm-kernel-256-tokens-gate_up": "We think that both are held by the tensor cores under the GPU's power limit: 51.5 GFLOP in 75 us.",
    "gemm-256-tokens-4096x4096": _TREE_256,
    "gemm-256-tokens-12288x4096": _TREE_256,
    "gemm-256-tokens-24576x4096": _TREE_256,
    "gemm-kernel-256-tokens-down": _TREE_256,
}
