"""The real run: configs/smollm2_h200.yaml in iso numerics, killed in its middle and resumed; beside it native numerics.

    python -m benchmarks.real_run OUT [kill iso native] [--config FILE] [--work FOLDER] [--seconds N] [key=value ...]
    python -m benchmarks.real_run --record OUT

Parts, each by the command that a user would type, in processes of their own:

    kill     the first steps twice: once straight through, once killed by SIGKILL and resumed; every bit compared
    iso      the run; SIGKILL in its middle, beyond a checkpoint; steps that both lives made are compared
    native   its first steps in native numerics, under XLA's default flags

What is there in --work is continued, so that a call which ran out of --seconds is typed again. Every call writes into OUT what
there is: real_run.json (rows), real_run.md (the table), real_run.png, runs.tgz. --record enters the rows in results.jsonl, and puts
table and picture into docs/training.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator

from benchmarks import report
from benchmarks.real_run_report import compared, markdown, rows
from trainer.config import TrainConfig
from trainer.metrics import FILE as METRICS

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "smollm2_h200.yaml"
PARTS = ("kill", "iso", "native")
COMMAND = "python -m benchmarks.real_run OUT"
GUIDE = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- real run -->", "<!-- end of real run -->"
GRACE_S = 40.0
"""From SIGTERM on, what a run may take to save its last finished step."""
WRITING_S = 20.0
"""What OUT takes to be written at the end."""
KEPT = ("config.yaml", "contract.json", METRICS, "evaluations.jsonl", "samples")
"""What of a run folder goes into OUT."""
DIFFERENCES = (
    "import json, pathlib, sys; from tests.trainer import kill_many;"
    " print(json.dumps(kill_many.differences(*map(pathlib.Path, sys.argv[1:]))))"
)


class OutOfTime(Exception):
    """The call's seconds are used up; what was finished is saved."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      folder: of the run. command: starts or continues it. environ: of the process.
    """

    folder: pathlib.Path
    command: tuple[str, ...]
    environ: dict[str, str]

    @property
    def steps(self) -> int:
        """Whole rows of metrics.jsonl."""
        path = self.folder / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix(".log")

    def live(self, deadline: float, kill_at: int | None = None) -> Iterator[None]:
        """One life of the run, a process; yields while it lives.

        Args:
          deadline: time.monotonic() at which it gets SIGTERM, and GRACE_S later SIGKILL.
          kill_at: number of finished steps at which it is killed by SIGKILL.

        Raises:
          OutOfTime: the deadline passed.
          RuntimeError: it ended by itself and not well, or before kill_at; with the end of its log.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            process = subprocess.Popen(self.command, cwd=ROOT, env=self.environ, stdout=log, stderr=subprocess.STDOUT)
        killed = False
        try:
            while process.poll() is None:
                if kill_at is not None and self.steps >= kill_at:
                    process.kill()
                    killed = True
                    break
                if time.monotonic() > deadline:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                    raise OutOfTime(f"{self.folder.name} stopped after {self.steps} steps; the same command goes on")
                yield
        finally:
            process.kill()
            process.wait()
        if not killed and (process.returncode or kill_at is not None):
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.folder.name} ended by itself with {process.returncode} after {self.steps} steps:\n{tail}")


def together(*lives: Iterator[None]) -> None:
    """Runs lives side by side until all have ended."""
    running = list(lives)
    try:
        while running:
            for life in list(running):
                if next(life, StopIteration) is StopIteration:
                    running.remove(life)
            time.sleep(0.05)
    finally:
        for life in running:
            life.close()


class RealRun:
    """The parts, over one work folder."""

    def __init__(self, config: str, overrides: list[str], work: pathlib.Path, deadline: float, native_steps: int, kill_steps: int):
        self._config, self._overrides, self.work, self._deadline = config, overrides, work, deadline
        self._native_steps, self._kill_steps = native_steps, kill_steps
        self.config = TrainConfig.load(config, overrides)
        work.mkdir(parents=True, exist_ok=True)

    def _run(self, name: str, *overrides: str, memory: float | None = None) -> Run:
        environ = {k: v for k, v in os.environ.items() if k != "ISOMODEL_NUMERICS"}
        environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(self.work / "cache"))  # a second life compiles nothing
        environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        if memory is not None:
            environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory)
        command = (sys.executable, "-m", "isomodel.cli", "train", self._config, *self._overrides,
                   f"name={name}", f"run_dir={self.work}", *overrides)  # fmt: skip
        return Run(self.work / name, command, environ)

    def _once(self, name: str, make: Callable[[], dict]) -> dict:
        """What `make` found, kept in NAME.json: a later call reads it."""
        path = self.work / f"{name}.json"
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(make(), indent=1))
            temporary.rename(path)
        return json.loads(path.read_text())

    def kill(self) -> None:
        """The first steps straight through and, beside it, killed and resumed; compared when both are done."""

        def make() -> dict:
            steps, at = self._kill_steps, self._kill_steps * 2 // 3
            every = max(1, at - 1 - at // 3)  # so that some steps are lost
            settings = [f"train.steps={steps}", f"checkpoint.every={every}", "eval.every=0", "log.samples=null", "log.samples_every=1"]
            straight, killed = (self._run(name, *settings, *self._schedule(), memory=0.45) for name in ("straight", "killed"))

            def two_lives() -> Iterator[None]:
                if killed.steps < at:
                    yield from killed.live(self._deadline, kill_at=at)
                yield from killed.live(self._deadline)

            together(straight.live(self._deadline), two_lives())
            command = [sys.executable, "-c", DIFFERENCES, str(straight.folder), str(killed.folder)]
            environ = killed.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the two could not be compared:\n{done.stderr[-3000:]}")
            return {"steps": steps, "killed_after": at, "checkpoint": at // every * every, "differences": json.loads(done.stdout.splitlines()[-1])}

        self._once("kill", make)

    def iso(self) -> None:
        """The run. Killed once in its middle; what the first life wrote is kept for the comparison."""
        run, every = self._run("iso"), self.config.checkpoint.every
        first = self.work / "iso_first_life"

        def make() -> dict:
            at = self.config.train.steps // 2
            if every:
                at = max(every, at // every * every) + max(1, every // 2)
            if run.steps < at:
                together(run.live(self._deadline, kill_at=at))
            shutil.rmtree(first, ignore_errors=True)
            first.mkdir()
            shutil.copy(run.folder / METRICS, first)
            if (run.folder / "samples").is_dir():
                shutil.copytree(run.folder / "samples", first / "samples")
            return {"killed_after": run.steps, "checkpoint": run.steps // every * every if every else 0}

        found = self._once("iso_killed", make)

        def finish() -> dict:
            together(run.live(self._deadline))
            return found | {"steps": run.steps, "differences": compared(first, run.folder)}

        self._once("iso", finish)

    def native(self) -> None:
        """The first steps in native numerics, same seed."""
        settings = ["numerics=native", f"train.steps={self._native_steps}", "checkpoint.every=0"]
        run = self._run("native", *settings, *self._schedule())

        def finish() -> dict:
            together(run.live(self._deadline))
            return {"steps": run.steps}

        self._once("native", finish)

    def _schedule(self) -> list[str]:
        """Keeps the whole run's learning rates where fewer steps are made."""
        total = self.config.optimizer.total_steps
        return [] if total is None else [f"optimizer.total_steps={total}"]

    def write(self, out: pathlib.Path, facts: dict) -> None:
        """Everything that there is, into `out`."""
        out.mkdir(parents=True, exist_ok=True)
        found = {n: json.loads((self.work / f"{n}.json").read_text()) for n in ("kill", "iso") if (self.work / f"{n}.json").exists()}
        runs = {n: self.work / n for n in ("iso", "native") if (self.work / n / METRICS).exists()}
        with tarfile.open(out / "runs.tgz", "w:gz") as archive:
            for path in sorted(self.work.iterdir()):
                if path.suffix in (".json", ".log"):
                    archive.add(path, path.name)
                elif path.is_dir():
                    for name in KEPT:
                        if (path / name).exists():
                            archive.add(path / name, f"{path.name}/{name}")
        if not runs:
            return
        command = [sys.executable, "-m", "isomodel.cli", "plot", *map(str, runs.values()), "-o", str(out / "real_run.png")]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
        text = markdown(self.config, runs, found, facts)
        (out / "real_run.md").write_text(text)
        made = [{"area": "engine", "command": COMMAND} | facts | row for row in rows(self.config, runs, found)]
        (out / "real_run.json").write_text(json.dumps(made, indent=1) + "\n")
        print(text)


def enter(out: pathlib.Path, reason: str | None, results: pathlib.Path = report.RESULTS, guide: pathlib.Path = GUIDE) -> int:
    """Enters what `write` left in `out`; returns how many rows.

    Raises:
      report.ResultsError: a row cannot be used, or the guide does not have its marks. Nothing was entered.
    """
    text = guide.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise report.ResultsError(f"{guide} needs {BEGIN} and {END}, once each")
    made = [row | {"reason": reason} for row in json.loads((out / "real_run.json").read_text())]
    entered = report.record_all(made, results)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    picture = "![reward, parity, ratio and time of the real run in iso and native numerics](real_run.png)"
    guide.write_text(f"{before}{BEGIN}\n{(out / 'real_run.md').read_text()}\n{picture}\n{END}{after}")
    shutil.copy(out / "real_run.png", guide.parent)
    return len(entered)


def facts() -> dict:
    """Of this machine and checkout, as report.record wants them. ISOMODEL_COMMIT names the commit where there is no repository."""
    names = [n for n in ("jax", "jaxlib", "jax-cuda13-plugin", "flax") if _installed(n)]
    return {
        "gpu": report.this_machine(),
        "versions": {n: importlib.metadata.version(n) for n in names},
        "commit": os.environ.get("ISOMODEL_COMMIT") or report.head(),
        "date": datetime.date.today().isoformat(),
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """0 when all parts asked for are done; 75 when the seconds ran out: type the same again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("words", nargs="*", metavar="PART|key=value", help=f"of {', '.join(PARTS)}; all by default; settings")
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/real_run"), help="folder of the runs")
    parser.add_argument("--seconds", type=float, default=560, help="longest time of this call (default: 560)")
    parser.add_argument("--native-steps", type=int, default=60)
    parser.add_argument("--kill-steps", type=int, default=12)
    parser.add_argument("--record", type=pathlib.Path, metavar="OUT", help="enter what a run left there, and do nothing else")
    parser.add_argument("--reason", help="with --record: why a target is missed, if one is")
    args = parser.parse_intermixed_args(argv)
    if args.record:
        print(f"{enter(args.record, args.reason)} rows entered")
        return 0
    if args.out is None:
        parser.error("name the folder to write to")
    overrides = [w for w in args.words if "=" in w]
    parts = [w for w in args.words if "=" not in w]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}")
    deadline = time.monotonic() + args.seconds - GRACE_S - WRITING_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are ended on the way out
    real = RealRun(args.config, overrides, args.work.resolve(), deadline, args.native_steps, args.kill_steps)
    try:
        for part in parts or PARTS:
            start = time.monotonic()
            getattr(real, part)()
            print(f"{part}: done, {time.monotonic() - start:.0f} s in this call", flush=True)
    except OutOfTime as e:
        print(f"out of time: {e}", flush=True)
        return 75
    finally:
        real.write(args.out, facts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
