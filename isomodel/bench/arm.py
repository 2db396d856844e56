"""One engine's measurement in a process of its own, started here; its last line of output is the result."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from typing import Any

from isomodel.bench.work import Work
from pallas_kernels import environment

ARMS = {"iso": "isomodel.bench.iso_arm", "native": "isomodel.bench.iso_arm", "vllm": "isomodel.bench.vllm_arm"}
"""Name -> module with `run`. `native` is our engine on XLA's dots and attention."""
VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_START = "import sys; from isomodel.bench import arm; arm.main(*sys.argv[1:])"


class ArmFailed(RuntimeError):
    """A process of a benchmark ended without a result; the message has the end of what it wrote."""


def measure(name: str, python: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
    """What arm `name`'s `run` returns, in a process of its own.

    Args:
      python: interpreter that has the arm's engine installed.
      timeout: seconds.
      **arguments: of `run`; `works` as dicts.

    Raises:
      ArmFailed: it failed, or took longer.
    """
    environ = environment.environ_for("native" if name == "native" else "iso")
    if name == "vllm":
        environ = dict(os.environ) | {k: os.environ.get(k, v) for k, v in VLLM_ENVIRONMENT.items()}
    command = [python, "-c", _START, name, json.dumps(arguments)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        raise ArmFailed(f"{name} took longer than {timeout:.0f} s; raise --seconds") from e
    if done.returncode:
        raise ArmFailed(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(name: str, text: str) -> None:
    """Runs arm `name` with the arguments of `measure` (JSON) in this process and prints its result."""
    arguments = json.loads(text)
    arguments["works"] = [Work(**work) for work in arguments["works"]]
    if name == "native":
        arguments["options"]["mode"] = "native"
    print(json.dumps(importlib.import_module(ARMS[name]).run(**arguments)), flush=True)
