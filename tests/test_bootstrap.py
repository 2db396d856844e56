"""scripts/bootstrap.sh on machines of every kind, played by small shell scripts in the place of Python."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent

PYTHON = """#!/bin/sh
# Plays a Python: knows its version, makes environments that hold a copy of itself, notes what it was asked to install.
case "$*" in
    *version_info*) {fits} ;;
    *ensurepip*) {has_venv} ;;
    --version) echo "Python played" ;;
    "-m venv "*) mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) echo "$*" >>"$INSTALLED"; echo "pip says no"; {installs} ;;
    *) exit 1 ;;
esac
"""


class Machine:
    """A folder with a checkout, a home and a PATH that holds no Python until one is put there."""

    def __init__(self, folder: pathlib.Path):
        self.checkout, self.home, self.bin = folder / "check out", folder / "home dir", folder / "bin"
        self.installed = folder / "installed"
        for made in (self.checkout / "scripts", self.home, self.bin):
            made.mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "scripts/bootstrap.sh"):
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in "sh dirname cat cksum ls rm mkdir touch cp grep tail flock".split():
            if at := shutil.which(tool):
                (self.bin / tool).symlink_to(at)

    def python(self, path: pathlib.Path, fits=True, has_venv=True, installs=True) -> pathlib.Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        answers = {k: "exit 0" if v else "exit 1" for k, v in locals().items() if k in ("fits", "has_venv", "installs")}
        path.write_text(PYTHON.format(**answers))
        path.chmod(0o755)
        return path

    def run(self, **variables: str) -> subprocess.CompletedProcess:
        environ = {"PATH": str(self.bin), "HOME": str(self.home), "INSTALLED": str(self.installed)} | variables
        command = ["/bin/sh", str(self.checkout / "scripts" / "bootstrap.sh")]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    def installs(self) -> int:
        return len(self.installed.read_text().splitlines()) if self.installed.exists() else 0


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_no_python_says_what_to_install(machine):
    machine.python(machine.bin / "python3", fits=False)
    done = machine.run()
    assert done.returncode == 1
    assert "no Python 3.12, 3.13 or 3.14 found" in done.stderr and "pyenv install 3.12" in done.stderr
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize(
    "where",
    [
        "bin/python3.12",
        "bin/python3.13",
        "bin/python3",
        "home dir/.pyenv/versions/3.12.1/bin/python3",
        "home dir/.local/share/uv/python/cpython-3.13.0-linux/bin/python3",
        "home dir/.local/share/mise/installs/python/3.14.1/bin/python3",
    ],
)
def test_finds_python_wherever_it_is(machine, where):
    machine.python(machine.bin / "python", fits=False)  # the first on PATH is too old, as a pyenv shim may be
    machine.python(machine.bin.parent / where)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert where in done.stderr and machine.installs() == 1
    assert "-c constraints.txt -e .[dev]" in machine.installed.read_text()


def test_pyenv_root_and_a_named_interpreter(machine, tmp_path):
    machine.python(tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python3")
    assert machine.run(PYENV_ROOT=str(tmp_path / "pyenv")).returncode == 0
    old = machine.python(tmp_path / "old", fits=False)
    done = machine.run(PYTHON=str(old))
    assert done.returncode == 1 and f"PYTHON={old} is no Python 3.12" in done.stderr
    assert machine.run(PYTHON=str(machine.python(tmp_path / "new"))).returncode == 0


def test_python_without_venv_names_the_package(machine):
    machine.python(machine.bin / "python3.12", has_venv=False)
    done = machine.run()
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr


def test_installs_again_only_when_something_changed(machine):
    machine.python(machine.bin / "python3.12")
    assert [machine.run().returncode for _ in range(3)] == [0, 0, 0]
    assert machine.installs() == 1
    with open(machine.checkout / "constraints.txt", "a") as file:
        file.write("# another version\n")
    assert machine.run().returncode == 0 and machine.installs() == 2
    (machine.checkout / ".venv" / "bin" / "python").unlink()  # the Python that it was made with is gone
    assert machine.run().returncode == 0 and machine.installs() == 3
    machine.checkout.rename(machine.checkout.parent / "moved")  # and so are the paths in it
    machine.checkout = machine.checkout.parent / "moved"
    assert machine.run().returncode == 0 and machine.installs() == 4


def test_a_failed_install_shows_why_and_is_made_anew(machine):
    python = machine.python(machine.bin / "python3.12", installs=False)
    done = machine.run()
    assert done.returncode == 1 and "pip says no" in done.stderr and "installing failed" in done.stderr
    assert machine.run().returncode == 1 and machine.installs() == 2  # a part of an environment is never taken for one
    machine.python(python)
    assert machine.run().returncode == 0 and machine.installs() == 3


def test_a_folder_that_is_no_environment_is_left_alone(machine):
    machine.python(machine.bin / "python3.12")
    folder = machine.checkout / ".venv"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    done = machine.run()
    assert done.returncode == 1 and "is no virtual environment" in done.stderr
    assert os.listdir(folder) == ["thesis.txt"]
