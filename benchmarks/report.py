"""benchmarks/results.jsonl, one measurement a line, and RESULTS.md, the page made from it.

A benchmark calls `record`; `python -m benchmarks.report` writes the page, and with --check says if it is up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import operator
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE / "RESULTS.md"
README = HERE.parent / "README.md"
GATE = HERE / "gpu_gate.json"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


class ResultsError(ValueError):
    """Measurements that cannot be used; the message lists every fault."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
      id: what is measured, in a few words joined by dashes; a later line of the same id replaces an earlier one.
      area: heading under which it stands.
      work: a sentence: the work, its sizes and dtypes.
      metric: unit of `ours` and `baseline`.
      ours: the figure.
      gpu: what it ran on; "none" and the CPU where there was no GPU.
      versions: of what reaches the figure. commit: that was measured.
      date: ISO date.
      command: what to type to measure it again.
      baseline: the same work, done the other way in the same run; None where there is none.
      baseline_name: what the other way is.
      target: "<= 3" and the like, of ours / baseline where there is a baseline, else of `ours`; None for none.
      reason: why a target is missed; needed then.
      ratio: ours / baseline.
      met: whether the target is; True where there is none.
    """

    id: str
    area: str
    work: str
    metric: str
    ours: float
    gpu: str
    versions: dict[str, str]
    commit: str
    date: str
    command: str
    baseline: float | None = None
    baseline_name: str | None = None
    target: str | None = None
    reason: str | None = None
    ratio: float | None = dataclasses.field(init=False)
    met: bool = dataclasses.field(init=False)

    def __post_init__(self):
        faults = [f"{n} is empty" for n in ("id", "area", "work", "metric", "gpu", "versions", "commit", "command") if not getattr(self, n)]
        numbers = {"ours": self.ours} | ({} if self.baseline is None else {"baseline": self.baseline})
        faults += [f"{n} is {v!r}, no number" for n, v in numbers.items() if type(v) not in (int, float)]
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            faults.append(f"date is {self.date!r}, not like 2026-11-30")
        target = re.fullmatch(r"(<=|>=|==|<|>) (\S+)", self.target or "== 0")
        if not target:
            faults.append(f"target is {self.target!r}, not like '<= 3'")
        if self.baseline is not None and not self.baseline_name:
            faults.append("a baseline needs baseline_name")
        if self.baseline == 0:
            faults.append("baseline is 0, so that there is no ratio")
        if not faults:
            ratio = None if self.baseline is None else self.ours / self.baseline
            met = self.target is None or _COMPARE[target[1]](self.ours if ratio is None else ratio, float(target[2]))
            object.__setattr__(self, "ratio", ratio)
            object.__setattr__(self, "met", met)
            if not met and not self.reason:
                faults.append(f"misses its target {self.target} and gives no reason")
        if faults:
            raise ResultsError(f"result {self.id!r}: " + "; ".join(faults))


def this_machine() -> str:
    """What this runs on, for `Result.gpu`; of the GPUs of the machine those that the process may use."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            query += ["-i", visible]
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
        if names[0].strip():
            return f"{sum(map(bool, names))} x {names[0].strip()}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"none; {_cpu()}"


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cores = sum(line.startswith("processor") for line in lines)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
    return f"{model}, {cores} cores"


def head() -> str:
    """Short hash of this checkout's commit; "" where there is no repository."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def record(path: pathlib.Path = RESULTS, **fields) -> Result:
    """Appends one measurement. `gpu`, `versions`, `commit` and `date` default to this machine's, this checkout's and today.

    Args:
      path: the file.
      **fields: Result's.

    Raises:
      ResultsError: a field is missing or wrong.
    """
    here = {
        "gpu": this_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "commit": head(),
        "date": datetime.date.today().isoformat(),
    }
    (result,) = record_all([here | fields], path)
    return result


def facts(*packages: str) -> dict:
    """`gpu`, `versions` (of jax, jaxlib, the CUDA plugin, flax and `packages`), `date` and `commit` of a run, for `enter`."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", *packages)
    return {
        "gpu": this_machine(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("ISOMODEL_COMMIT") or head(),
    }


def enter(path: pathlib.Path, area: str, reasons: Mapping[str, str]) -> int:
    """Appends the rows of a file {"facts", "rows", "failed"} to results.jsonl; a missed target gets its reason by its id.

    The machine with the GPU may be another than the one with the repository, so measuring and entering are two steps.
    Returns 0, an exit code.

    Raises:
      ResultsError: a row cannot be used; none is appended.
    """
    found = json.loads(path.read_text())
    record_all([{"area": area} | found["facts"] | {"reason": reasons.get(row["id"])} | row for row in found["rows"]])
    print(f"{len(found['rows'])} rows entered; failed: {', '.join(found['failed']) or 'none'}")
    return 0


def record_all(rows: list[dict], path: pathlib.Path = RESULTS) -> list[Result]:
    """Appends measurements, all of them or, where one cannot be used, none.

    Args:
      rows: Result's fields, of each.
      path: the file.

    Raises:
      ResultsError: what is missing or wrong, of every row at once.
    """
    results, faults = [], []
    for fields in rows:
        try:
            results.append(_result(fields))
        except ResultsError as e:
            faults.append(str(e))
    if faults:
        raise ResultsError("\n".join(faults))
    with open(path, "a") as file:
        file.writelines(json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    return results


def _result(fields: dict) -> Result:
    known = {f.name: f for f in dataclasses.fields(Result)}
    given = {name: value for name, value in fields.items() if name not in known or known[name].init}
    try:
        return Result(**given)
    except TypeError as e:
        raise ResultsError(f"result {fields.get('id')!r}: {str(e).removeprefix('Result.__init__() ')}") from e


def load(path: pathlib.Path = RESULTS) -> list[Result]:
    """The newest measurement of each id, in the order in which ids first appear.

    Raises:
      ResultsError: every line that cannot be used, by number; a line whose `ratio` or `met` is not what its figures
        give is one of them.
    """
    newest, faults = {}, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ResultsError("not a JSON object")
            result = _result(fields)
            for name in ("ratio", "met"):
                if name in fields and fields[name] != getattr(result, name):
                    raise ResultsError(f"{name} is {fields[name]}, and its figures give {getattr(result, name)}")
            newest[result.id] = result
        except ValueError as e:
            faults.append(f"line {number}: {e}")
    if faults:
        raise ResultsError(f"{path} cannot be used:\n" + "\n".join(f"  - {f}" for f in faults))
    return list(newest.values())


def _figure(x: float | None) -> str:
    return "-" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:,.1f}" if abs(x) >= 1000 else f"{x:.3g}"


def gate_tables(gate: dict) -> list[str]:
    """What the last run of tests/gpu compared by bits, a table for each file (tests/gpu/conftest.py writes `gate`)."""
    failed, skipped = gate["failed"], sum(gate["skipped"].values())
    lines = [
        "## Bits on the GPU",
        "",
        f"The last run of tests/gpu: {gate['date']}, commit {gate['commit']}, {gate['gpu']}, {gate['seconds']} s, "
        f"{gate['passed']} passed, {len(failed)} failed, {skipped} skipped. Values are compared as integers, and all of these "
        "were equal; a control is a comparison that had to show a difference and did.",
        "",
        *(f"- failed: `{name}`" for name in failed),
    ]
    for name, rows in gate.get("bits", {}).items():
        lines += ["", f"### tests/gpu/test_{name}.py", "", "| compared | cases | values | controls |", "|---|---|---|---|"]
        lines += [f"| {row} | {cases} | {values:,} | {controls} |" for row, (cases, values, controls) in rows.items()]
    if accuracy := gate.get("accuracy"):
        lines += ["", "## Accuracy on the GPU", "", "Relative error (2-norm) against float64 on the same input, in that run.", ""]
        lines += ["| op | computed | ours | library |", "|---|---|---|---|"]
        lines += [f"| {op} | {what} | {a:.3g} | {b:.3g} |" for op, rows in accuracy.items() for what, (a, b) in rows.items()]
    return [*lines, ""]


def render(results: list[Result], gate: dict | None = None) -> str:
    """The page: a table for each area, what the GPU gates compared, and what misses its target with the reason."""
    lines = ["# Results", "", "Made by `python -m benchmarks.report` from results.jsonl; measured, never typed.", ""]
    for area in dict.fromkeys(r.area for r in results):
        of_area = [r for r in results if r.area == area]
        lines += [f"## {area}", "", "| work | ours | baseline | ratio | target | met |", "|---|---|---|---|---|---|"]
        for r in of_area:
            baseline = "-" if r.baseline is None else f"{_figure(r.baseline)} {r.metric} ({r.baseline_name})"
            met = "-" if r.target is None else "yes" if r.met else "**no**"
            cells = (r.work, f"{_figure(r.ours)} {r.metric}", baseline, _figure(r.ratio), r.target or "-", met)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines += ["", "Measured:", ""]
        lines += [f"- {r.id}: {r.date}, {r.commit}, GPU {r.gpu}, `{r.command}`" for r in of_area]
        lines.append("")
    lines += gate_tables(gate) if gate else []
    missed = [r for r in results if not r.met]
    lines += ["## Short of target", ""]
    lines += [
        f"- {r.work}: {_figure(r.ours if r.ratio is None else r.ratio)} against {r.target}. {r.reason}" for r in missed
    ] or ["None."]
    return "\n".join(lines) + "\n"


def with_table(readme: str, results: list[Result]) -> str:
    """The README with its tables of figures that have a target, one for each area, between the two marks, made anew.

    Raises:
      ResultsError: it does not have the marks.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ResultsError(f"the README needs {BEGIN} and {END}, once each")
    lines = []
    aimed = [r for r in results if r.target is not None]
    for area in dict.fromkeys(r.area for r in aimed):
        rows = [r for r in aimed if r.area == area]
        machines = "; ".join(dict.fromkeys(r.gpu.removeprefix("none; ") for r in rows))
        lines += ["", f"**{area}** ({machines})", "", "| what | ours | baseline | target | met |", "|---|---|---|---|---|"]
        for r in rows:
            baseline = "-" if r.baseline is None else f"{_figure(r.baseline)} {r.metric} ({_figure(r.ratio)}x)"
            met = "yes" if r.met else "**no**"
            lines.append(f"| {r.work} | {_figure(r.ours)} {r.metric} | {baseline} | {r.target} | {met} |")
    before, rest = readme.split(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n\n" + END + rest.split(END)[1]


def main(argv: list[str] | None = None) -> int:
    """Writes the page and the README's table; with --check writes nothing and returns 1 where it is out of date. 2 for unusable results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether RESULTS.md is up to date")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE)
    parser.add_argument("--gate", type=pathlib.Path, default=GATE, help="what tests/gpu wrote")
    parser.add_argument("--readme", type=pathlib.Path, default=README)
    args = parser.parse_args(argv)
    try:
        results = load(args.results)
        gate = json.loads(args.gate.read_text()) if args.gate.exists() else None
        wanted = {args.page: render(results, gate), args.readme: with_table(args.readme.read_text(), results)}
    except (OSError, ResultsError) as e:
        print(e, file=sys.stderr)
        return 2
    if not args.check:
        for path, text in wanted.items():
            path.write_text(text)
        return 0
    stale = [str(path) for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path} is out of date; run: python -m benchmarks.report", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
