"""Why a kernel's figure is short of its target, by result id; report.record asks for one where a target is missed."""

_FEW_64 = (
    "33.5 MB take 8.2 us at the copy's rate, and 10.9 are allowed; the kernel alone takes 11.2, and a loop's counter 0.4 to 0.7 a GEMM. With "
    "parts left out: without the weight's loads 7.2 us of 11.8, without x's as well 7.0, without the exchange between the two programs of a "
    "tile, too, 6.3: start, filling the pipeline, products and stores, which the loads hide only in part. ncu sees no unit above 60 % of its "
    "peak and multiprocessors busy for 77 % of the time, and the library's kernel slower (13.4 us to our 12.5). Loads of the weight "
    "in rings of their own, k tiles of 256 and of 64, 32 rows without a split, x shared by a cluster: slower. The halves as one bulk "
    "copy between the programs gave 0.748 in a variant that is not finished."
)
_TREE_256 = (
    "A tile of 128 x 128 with half of the leaves in each of two programs, which exchange halves: of 19.7 us at 4096 x 4096 the exchange takes 3.1, x 1.6, the "
    "weights 3.2, and 13.4 are left without them. Through the L2 cache go 376 MB at 4096 x 12288, where the library moves 283 (ncu); it "
    "shares loads in clusters of two, which the exchange takes up here, and more than 29 clusters of four do not find their SMs side by side."
)
_POWER = (
    "Held by the GPU's power limit, in turns of 10 ms with the library. Without the limit (single calls under ncu) our kernel is the faster one, 698 us to 709 at "
    "16384 x 4096 x 4096, with the tensor cores busy for 93 % to 92 % of the time; but it moves 4.9 GB through the L2 cache where the library moves 4.1 (its tile is "
    "320 x 128, ours 128 x 256 in clusters of two), which we think is the power that is missing. Tiles of 256 x 128, 128 x 192, 128 x 128, other bands and clusters: no better."
)

REASONS: dict[str, str] = {
    "attention-forward-2k": (
        "The issue asks for it at 8k. Runs of this row on one day: 1.01, 0.93; cuDNN's own figure moved from 445 to 480 TFLOP/s. A tile of 2k has few blocks to hide its ends "
        "in: the next tile's scores under this one's last products would need a second buffer for Q, and shared memory is full."
    ),
    "gemm-chain-8192x8192x8192": _POWER,
    "gemm-chain-16384x4096x4096": _POWER,
    "gemm-chain-4096x12288x4096": _POWER,
    "gemm-tree-16384x4096x4096": (
        "Held by the power limit as the chains are (0.91 to 0.93 between runs). Sums of 8 leaves need registers and shared memory, so that a tile is 128 x 128 at most and about half as much again "
        "goes through the L2 cache as with the library's 320 x 128; additions at the ends of leaves are 3 % of the work. 128 x 112 with the whole "
        "tree in registers, 128 x 96, clusters, staggered warpgroups: 0.80 to 0.93 in the same turns."
    ),
    "gemm-64-tokens-4096x4096": _FEW_64,
    "gemm-64-tokens-6144x4096": _FEW_64,
    "gemm-kernel-64-tokens-o": _FEW_64,
    "gemm-kernel-256-tokens-gate_up": "Within 2 % of the library from run to run; both keep the tensor cores busy for 80 % of the time (ncu).",
    "gemm-256-tokens-4096x4096": _TREE_256,
    "gemm-256-tokens-12288x4096": f"Within 1 % of the library from run to run. {_TREE_256}",
    "gemm-256-tokens-24576x4096": f"Within 1 % of the library from run to run. {_TREE_256}",
    "gemm-kernel-256-tokens-down": _TREE_256,
}
