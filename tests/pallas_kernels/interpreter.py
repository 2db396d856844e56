"""Tests of the interpreter that need more threads of XLA's CPU client than their process has, which counts them at its start."""

from __future__ import annotations

import os
import subprocess
import sys

from pallas_kernels import mosaic


def run(code: str) -> None:
    """Runs Python code in a process with threads for all warpgroups: one that waits holds its thread, and on a machine of 2 CPUs
    none is left for the one that it waits for."""
    environ = os.environ | {"PJRT_NPROC": str(mosaic.INTERPRETER_THREADS)}
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=180)
    assert child.returncode == 0, child.stderr[-2000:]
