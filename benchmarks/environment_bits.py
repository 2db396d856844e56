"""Which facts of the environment reach the bits on this CPU: one forward in a fresh process for each setting.

Prints, for iso and for native numerics, whether hidden rows and log-probabilities of a small random model have the bits
that they have under the first setting. The evidence for docs/numerics.md: what must stand in a contract's environment.

    python -m benchmarks.environment_bits
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import isomodel  # noqa: F401  (sets XLA's flags)
from pallas_kernels import environment

SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "again, another process": {},
    "NPROC=1": {"NPROC": "1"},
    "NPROC=8": {"NPROC": "8"},
    "--xla_cpu_max_isa=AVX2": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "--xla_cpu_max_isa=AVX512": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512"},
    "--xla_cpu_prefer_vector_width=512": {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"},
    "--xla_cpu_multi_thread_eigen=false": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
    "--xla_cpu_experimental_ynn_fusion_type= (no YNNPACK)": {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="},
    "--xla_cpu_use_xnnpack=false": {"XLA_FLAGS": "--xla_cpu_use_xnnpack=false"},
}
"""Each setting's environment variables. NPROC is the number of threads of XLA's CPU client."""

ROWS = 192


def forward_digests(mode: str) -> dict[str, str]:
    """SHA-256 of hidden rows and log-probabilities for both compute dtypes; same weights and tokens every time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from isomodel import model, specs
    from isomodel.batch import Batch, TrainPages
    from isomodel.config import ModelConfig
    from isomodel.numerics import Numerics

    cfg = ModelConfig(
        family="qwen3", vocab_size=3000, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=8, num_kv_heads=4,
        head_dim=64, rms_norm_eps=1e-6, rope_theta=1e6, max_positions=512, tie_embeddings=True, qk_norm=True,
    )  # fmt: skip
    tokens_T = jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab_size, ROWS), jnp.int32)
    rows_T = jnp.arange(ROWS, dtype=jnp.int32)
    int32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731
    batch = Batch(tokens_T, rows_T, rows_T, int32(0, ROWS), int32(ROWS), int32([0, 1]))
    found = {}
    for dtype in ("bfloat16", "float32"):
        numerics = Numerics(mode=mode, compute_dtype=dtype)
        params = specs.cast_params(specs.init_params(cfg, seed=0), numerics.dtype)

        @jax.jit
        def run(params, batch, numerics=numerics):
            hidden_TD, _ = model.forward(cfg, numerics, params, batch, TrainPages(2, 128))
            targets_T = jnp.roll(batch.tokens_T, -1)
            return hidden_TD, model.logprobs(cfg, numerics, params, hidden_TD, targets_T, jnp.ones(ROWS, jnp.float32))

        for name, x in zip(("hidden", "logprobs"), run(params, batch), strict=True):
            found[f"{dtype} {name}"] = hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
    weights = b"".join(np.asarray(w).tobytes() for w in params.values())
    return found | {"weights": hashlib.sha256(weights).hexdigest()}


def in_fresh_process(mode: str, variables: dict[str, str]) -> dict[str, str]:
    """`forward_digests` under a setting; {"error": its last line} where XLA refuses it."""
    command = [sys.executable, "-m", "benchmarks.environment_bits", mode]
    environ = environment.environ_for(mode) | {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(forward_digests(sys.argv[1])))
        return
    os.environ.pop("XLA_FLAGS", None)
    for mode in environment.MODES:
        print(f"{mode} numerics, {os.cpu_count()} CPUs")
        base = None
        for name, variables in SETTINGS.items():
            digests = in_fresh_process(mode, variables)
            base = base or digests
            differ = [key for key in digests if digests[key] != base.get(key)]
            print(f"  {name}: {digests.get('error') or ('other bits in ' + ', '.join(differ) if differ else 'same bits')}")


if __name__ == "__main__":
    main()
