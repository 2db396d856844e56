"""Speed of the reference backend on this CPU against plain JAX: SmolLM2-135M shapes, random weights.

    python -m benchmarks.reference_cpu            # both sides, alternating, rows appended to benchmarks/results.jsonl

The baseline is the same model on XLA's own dots and jax.nn attention (numerics native), in processes of its own under
XLA's default flags. Medians over all repetitions of three processes a side.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from benchmarks import report

ROOT = pathlib.Path(__file__).parent.parent
TARGET = "<= 3"
WORK = {
    "forward-1024": "SmolLM2-135M forward and log-probabilities, 1024 tokens",
    "decode-16x256": "SmolLM2-135M decode step with logits, 16 sequences of 256 tokens",
}


def measure(mode: str, repetitions: int) -> dict[str, list[float]]:
    """Seconds of each piece of work in this process, after compilation."""
    os.environ["ISOMODEL_NUMERICS"] = mode
    from pallas_kernels import environment

    environment.use(mode)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from isomodel import model, specs
    from isomodel.batch import KVCache, Rows, TrainPages, make_batch
    from isomodel.config import ModelConfig
    from isomodel.numerics import Numerics

    cfg = ModelConfig(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope_theta=1e5, max_positions=8192, tie_embeddings=True,
        qk_norm=False,
    )  # fmt: skip
    numerics = Numerics(mode=mode)
    params = jax.block_until_ready(specs.init_params(cfg, 0, jnp.bfloat16))
    rng = np.random.default_rng(0)
    T, S, length, page = 1024, 16, 256, 16

    @jax.jit
    def forward(params, batch, targets_T):
        hidden_TD, _ = model.forward(cfg, numerics, params, batch, TrainPages(T // 128, 128))
        return model.logprobs(cfg, numerics, params, hidden_TD, targets_T, jnp.ones(T))

    def decode(params, batch, cache):
        hidden_SD, cache = model.forward(cfg, numerics, params, batch, cache)
        return model.logits(cfg, numerics, params, hidden_SD), cache

    ids = rng.integers(0, cfg.vocab_size, T + 1)
    packed = make_batch([Rows(ids[:T], 0, T, range(T // 128))], 128, T=T, S=1, P=T // 128)
    per = length // page
    rows = [Rows(ids[:length], length - 1, length, range(s * per, (s + 1) * per)) for s in range(S)]
    step = make_batch(rows, page, T=S, S=S, P=per)
    shape = KVCache.zeros(cfg, S * per, page).k_LNpKd.shape
    cache = KVCache(*(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(2)))
    decode = jax.jit(decode, donate_argnums=2)
    seconds: dict[str, list[float]] = {name: [] for name in WORK}
    for i in range(repetitions + 1):
        start = time.perf_counter()
        jax.block_until_ready(forward(params, packed, jnp.asarray(ids[1:])))
        middle = time.perf_counter()
        logits, cache = jax.block_until_ready(decode(params, step, cache))
        end = time.perf_counter()
        if i:  # the first one compiles
            seconds["forward-1024"].append(middle - start)
            seconds["decode-16x256"].append(end - middle)
    return seconds


def compare(processes: int, repetitions: int) -> list[report.Result]:
    """Records both sides in alternating processes."""
    seconds = {mode: {name: [] for name in WORK} for mode in ("iso", "native")}
    for _ in range(processes):
        for mode in seconds:
            command = [sys.executable, "-m", "benchmarks.reference_cpu", "--mode", mode, "--repetitions", str(repetitions)]
            out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for name, values in json.loads(out.splitlines()[-1]).items():
                seconds[mode][name] += values
    return [
        report.record(
            area="foundation",
            id=f"reference-cpu-{name}",
            work=work,
            metric="s",
            ours=round(statistics.median(seconds["iso"][name]), 4),
            baseline=round(statistics.median(seconds["native"][name]), 4),
            baseline_name="the same model in plain JAX (native), XLA's default flags",
            target=TARGET,
            command="python -m benchmarks.reference_cpu",
        )
        for name, work in WORK.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("iso", "native"), help="only this side, in this process")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=3, help="of each side")
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(measure(args.mode, args.repetitions)))
        return 0
    results = compare(args.processes, args.repetitions)
    for r in results:
        print(f"{r.work}: {r.ours} s against {r.baseline} s, {r.ratio:.2f}x (target {r.target})")
    return int(not all(r.met for r in results))


if __name__ == "__main__":
    sys.exit(main())
