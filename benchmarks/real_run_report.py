"""What the real run showed: its table in Markdown, its rows for results.jsonl, and the comparison of two lives of a run."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Mapping

from trainer.config import TrainConfig
from trainer.metrics import FILE as METRICS
from trainer.metrics import read_metrics

TIMING = ("time/", "tokens_per_s/")
"""What two lives of a run need not have in common."""
LAST = 10
"""Steps whose mean reward stands for the start, and for the end, of a run."""
PHASES = {
    "whole step": "time/step_s",
    "generation": "time/generate_s",
    "rewards": "time/reward_s",
    "training (the gate included)": "time/train_s",
    "weight sync": "time/sync_s",
}

Row = Mapping[str, float]


def compared(first: pathlib.Path, whole: pathlib.Path) -> list[str]:
    """What of a killed life's metrics and samples is not, to the bit, what the run has now for the same steps."""
    before, now = read_metrics(first), {row["step"]: row for row in read_metrics(whole)}
    found = [
        f"{METRICS}, step {row['step']}: {names}"
        for row in before
        if (names := _unequal(row, now.get(row["step"], {})))
    ]
    for path in sorted((first / "samples").glob("*.jsonl")):
        other = whole / "samples" / path.name
        if not other.exists() or other.read_bytes() != path.read_bytes():
            found.append(f"samples/{path.name}")
    return found if before else ["the first life left no step to compare"]


def _unequal(a: Row, b: Row) -> list[str]:
    same = lambda x, y: repr(x) == repr(y)  # noqa: E731  (NaN equals nothing)
    return [k for k in sorted(a.keys() | b.keys()) if not k.startswith(TIMING) and not same(a.get(k), b.get(k))]


def summary(run: pathlib.Path, most: int | None = None) -> dict[str, float]:
    """Figures of a run, or of its first `most` steps; accuracies are NaN where it has not been evaluated."""
    steps = read_metrics(run)[:most]
    held_out = {step: x for step, x in evaluations(run).items() if step <= len(steps)}
    mean = lambda part, key: statistics.fmean(row[key] for row in part)  # noqa: E731
    tokens = sum(row["parity/tokens"] for row in steps)
    return {
        "steps": len(steps),
        "reward_first": mean(steps[:LAST], "reward/mean"),
        "reward_last": mean(steps[-LAST:], "reward/mean"),
        "held_out_first": held_out[min(held_out)] if held_out else math.nan,
        "held_out_last": held_out[max(held_out)] if held_out else math.nan,
        "held_out_step": max(held_out, default=0),
        "length_first": mean(steps[:LAST], "length/mean"),
        "length_last": mean(steps[-LAST:], "length/mean"),
        "tokens": int(tokens),
        "compared_nothing": sum(not row["parity/tokens"] for row in steps),
        "different": int(sum(row["parity/mismatched_tokens"] for row in steps)),
        "steps_different": sum(row["parity/mismatched_tokens"] > 0 for row in steps),
        "worst": max((row["parity/max_abs"] for row in steps), key=_nan_is_worst),
        "mean": sum(row["parity/mean_abs"] * row["parity/tokens"] for row in steps) / tokens if tokens else math.nan,
        "ratio": max((row["ratio/max"] for row in steps), key=_nan_is_worst),
        "ratio_least": min(row["ratio/min"] for row in steps),
        "tokens_per_s": statistics.median(row["tokens_per_s/generate"] for row in steps),
    } | {key: statistics.median(row[key] for row in steps) for key in PHASES.values()}


def _nan_is_worst(x: float) -> float:
    return math.inf if math.isnan(x) else x


def columns(runs: Mapping[str, pathlib.Path]) -> dict[str, dict[str, float]]:
    """The summary of each run and, beside a shorter one, of as much of the iso run."""
    sums = {name: summary(folder) for name, folder in runs.items()}
    if "iso" in sums and "native" in sums and sums["native"]["steps"] < sums["iso"]["steps"]:
        steps = sums["native"]["steps"]
        sums = {"iso": sums["iso"], f"iso, first {steps} steps": summary(runs["iso"], steps), "native": sums["native"]}
    return sums


def evaluations(run: pathlib.Path) -> dict[int, float]:
    """{step: held-out accuracy}."""
    path = run / "evaluations.jsonl"
    return {row["step"]: row["eval/reward_mean"] for row in read_metrics(path)} if path.exists() else {}


def markdown(config: TrainConfig, runs: Mapping[str, pathlib.Path], found: Mapping[str, dict], facts: Mapping) -> str:
    """The section for docs/training.md.

    Args:
      runs: run folders by "iso" and "native", at least one.
      found: what kills and resumes gave, by "iso" and "kill".
      facts: machine, versions, commit, date.
    """
    sums = columns(runs)
    versions = ", ".join(f"{n} {v}" for n, v in facts["versions"].items())
    r = config.rollout
    shown = {
        "steps": "{steps}",
        f"reward, first and last {LAST} steps": "{reward_first:.3f} -> {reward_last:.3f}",
        "held-out accuracy, before and after": "{held_out_first:.3f} -> {held_out_last:.3f}",
        f"tokens of a response, first and last {LAST} steps": "{length_first:.1f} -> {length_last:.1f}",
        "tokens compared": "{tokens:,}",
        "tokens whose log-probability has other bits": "{different:,}",
        "steps with such a token": "{steps_different}",
        "largest difference, nats": "{worst:.3g}",
        "mean difference, nats": "{mean:.3g}",
        "ratio of a token, least and largest": "{ratio_least:.6g} to {ratio:.6g}",
        "sampled tokens a second, median": "{tokens_per_s:,.0f}",
    }
    shown |= {f"{name}, median ms": "{" + key + ":.1f}" for name, key in PHASES.items()}
    in_ms = {n: s | {k: s[k] * 1e3 for k in PHASES.values()} for n, s in sums.items()}
    lines = [
        f"{facts['gpu']}, commit {facts['commit']}, {facts['date']}, {versions}: {r.prompts_per_step} prompts x "
        f"{r.samples_per_prompt} samples a step, up to {r.max_tokens} tokens, {config.data.held_out} held-out prompts.",
        "",
        "| | " + " | ".join(sums) + " |",
        "|---|" + "---|" * len(sums),
        *(f"| {what} | " + " | ".join(form.format(**s) for s in in_ms.values()) + " |" for what, form in shown.items()),
        "",
        *_table_of_evaluations(runs),
    ]
    if iso := found.get("iso"):
        lines.append(
            f"The iso run was killed by SIGKILL after step {iso['killed_after']} (newest checkpoint: step {iso['checkpoint']}) and went "
            f"on by the same command. Steps {iso['checkpoint'] + 1} to {iso['killed_after']} were made twice: "
            f"{_differences(iso['differences'])} between the two."
        )
    if kill := found.get("kill"):
        lines.append(
            f"{kill['steps']} steps without a kill, and {kill['steps']} killed after step {kill['killed_after']} and resumed from step "
            f"{kill['checkpoint']}: {_differences(kill['differences'])} in weights, optimizer state, metrics and all samples."
        )
    return "\n".join(lines) + "\n"


def _table_of_evaluations(runs: Mapping[str, pathlib.Path]) -> list[str]:
    by_run = {name: evaluations(folder) for name, folder in runs.items()}
    steps = sorted({step for found in by_run.values() for step in found})
    if not steps:
        return []
    row = lambda found: " | ".join(f"{found[s]:.3f}" if s in found else "" for s in steps)  # noqa: E731
    return [
        "| held-out accuracy after step | " + " | ".join(map(str, steps)) + " |",
        "|---|" + "---|" * len(steps),
        *(f"| {name} | {row(found)} |" for name, found in by_run.items()),
        "",
    ]


def _differences(found: list[str]) -> str:
    return f"{len(found)} differences" + (f" ({'; '.join(found[:5])})" if found else "")


def rows(config: TrainConfig, runs: Mapping[str, pathlib.Path], found: Mapping[str, dict]) -> list[dict]:
    """Fields of benchmarks.report.Result, less what is the same in all; of the parts that there are.

    Raises:
      RuntimeError: a step compared no token.
    """
    made = []
    work = f"SmolLM2-135M GRPO, {config.rollout.prompts_per_step} x {config.rollout.samples_per_prompt} responses a step"
    sums = {name: summary(folder) for name, folder in runs.items()}
    for name, s in sums.items():
        if s["compared_nothing"]:
            raise RuntimeError(f"{name}: {s['compared_nothing']} steps compared no token")
    iso, native = sums.get("iso"), sums.get("native")
    if iso:
        made.append(dict(id="real-run-parity", metric="nats", ours=iso["worst"], target="== 0",
            work=f"{work}, {iso['steps']} steps, {iso['tokens']:,} tokens: largest difference of a log-probability"))  # fmt: skip
        if not math.isnan(iso["held_out_last"]) and iso["held_out_first"] > 0:
            made.append(dict(id="real-run-held-out", metric="accuracy", ours=round(iso["held_out_last"], 4), target="> 1",
                baseline=round(iso["held_out_first"], 4), baseline_name="before training",
                work=f"its accuracy on {config.data.held_out} held-out prompts after step {iso['held_out_step']}"))  # fmt: skip
    if native:
        made.append(dict(id="real-run-native-parity", metric="nats", ours=native["worst"], target="> 0",
            work=f"{work} in native numerics, {native['steps']} steps, {native['different']:,} of {native['tokens']:,} tokens differ: "
            "largest difference"))  # fmt: skip
        made.append(dict(id="real-run-native-ratio", metric="ratio", ours=native["ratio"],
            work=f"{work} in native numerics: largest importance ratio of a token (iso: exactly 1)"))  # fmt: skip
    if iso:
        same = summary(runs["iso"], native["steps"]) if native else iso
        for name, key in PHASES.items():
            row = dict(id=f"real-run-{name.split(' (')[0].replace(' ', '-')}", metric="ms", ours=round(same[key] * 1e3, 2),
                work=f"{work}: {name}, median of the first {same['steps']} steps")  # fmt: skip
            if native and native[key]:
                row |= dict(baseline=round(native[key] * 1e3, 2), baseline_name="native")
            made.append(row)
    for name, what in (("iso", "the run, killed after step {killed_after}, against its first life from step {checkpoint} on"),
                       ("kill", "{steps} steps killed after step {killed_after} and resumed, against {steps} unkilled")):  # fmt: skip
        if name in found:
            made.append(dict(id=f"real-run-resume-{name}", metric="differences", ours=len(found[name]["differences"]), target="== 0",
                work=f"{work}: {what.format(**found[name])}"))  # fmt: skip
    return made
