"""One measurement in a process of its own, under the XLA flags of iso or of native numerics: XLA reads its flags once.

The memory of a GPU is shared by such processes, so none of them takes it all at its start.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from pallas_kernels import environment


def call(mode: str, module: str, function: str, *arguments: Any) -> Any:
    """What `<module>.<function>(*arguments)` returns (JSON values) in a process under `mode`; a name without a dot is a module of
    benchmarks.kernels.

    Raises:
      RuntimeError: the process failed; the end of what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.kernels.separate", mode, module, function, json.dumps(arguments)]
    environ = environment.environ_for(mode) | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module}.{function} under {mode} flags: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Processes of `call` inside measure one at a time (`timing.alone`), also where nobody named a lock before."""
    with tempfile.NamedTemporaryFile() as lock:
        name, before = "ISOMODEL_GPU_LOCK", os.environ.get("ISOMODEL_GPU_LOCK")
        os.environ[name] = before or lock.name
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]


if __name__ == "__main__":
    environment.use(sys.argv[1])
    module = sys.argv[2] if "." in sys.argv[2] else f"benchmarks.kernels.{sys.argv[2]}"
    found = getattr(importlib.import_module(module), sys.argv[3])
    print(json.dumps(found(*json.loads(sys.argv[4]))))
