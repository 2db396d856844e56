"""The command line: quick help, commands found by entry points, one clear message for a user's error."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess
import sys
import types

import pytest

from isomodel import cli
from isomodel.config import FaultyInput

ROOT = pathlib.Path(__file__).parents[2]


def run(*argv, capsys):
    try:
        code = cli.main(list(argv))
    except SystemExit as e:
        code = e.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def command(monkeypatch):
    """Puts a command `boom` that does what the test says in front of main."""

    def install(action):
        def add_commands(subparsers):
            parser = subparsers.add_parser("boom")
            parser.add_argument("overrides", nargs="*")
            parser.add_argument("--flag", action="store_true")
            parser.set_defaults(run=action)

        monkeypatch.setitem(sys.modules, "boom_command", types.SimpleNamespace(add_commands=add_commands))
        monkeypatch.setitem(cli.COMMANDS, "boom", ("boom_command", "does what the test says"))

    return install


def test_help_names_every_command_and_imports_no_heavy_module():
    script = (
        "import sys, isomodel.cli\n"
        "try: isomodel.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'flax', 'optax', 'matplotlib', 'transformers', 'reasoning_gym', 'orbax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in (*cli.COMMANDS, "train", "plot"):
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize("name", ["train", "plot", "export"])
def test_a_checkout_that_is_not_installed_has_every_command(name, capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert run(name, "--help", capsys=capsys)[0] == 0


@pytest.mark.parametrize("name", [*cli.COMMANDS, "train", "plot"])
def test_every_command_has_its_own_help(name, capsys):
    code, out, _ = run(name, "--help", capsys=capsys)
    assert code == 0 and out.startswith(f"usage: isomodel {name}")


def test_wrong_usage(capsys):
    assert run(capsys=capsys)[0] == 2
    code, _, err = run("trian", capsys=capsys)
    assert code == 2 and "invalid choice" in err
    code, _, err = run("plot", "x", "--nope", capsys=capsys)
    assert code == 2 and "isomodel plot: error: unrecognized arguments: --nope" in err
    code, _, err = run("plot", "x", "-o", "y", "z", capsys=capsys)
    assert code == 2 and "unrecognized arguments: z" in err


def test_a_checkout_that_is_not_installed_runs(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    code, out, _ = run("--version", capsys=capsys)
    assert code == 0 and "not installed" in out


def test_version(capsys):
    code, out, _ = run("--version", capsys=capsys)
    assert code == 0 and out.startswith("isomodel ")


def test_exit_codes(command, capsys):
    command(lambda args: None)
    assert run("boom", capsys=capsys)[0] == 0
    command(lambda args: 1)
    assert run("boom", capsys=capsys)[0] == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the page size is 3"), "isomodel: the page size is 3\n"),
        (FaultyInput("c.yaml", ["a", "b"]), "isomodel: c.yaml cannot be used:\n  - a\n  - b\n"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "isomodel: No such file or directory: x.gguf\n"),
        (ValueError(), "isomodel: ValueError\n"),
    ],
)
def test_a_users_error_is_one_message(error, message, command, capsys):
    def action(args):
        raise error

    command(action)
    assert run("boom", capsys=capsys) == (2, "", message)
    with pytest.raises(type(error)):
        cli.main(["--debug", "boom"])
    with pytest.raises(type(error)):
        cli.main(["boom", "--debug"])


def test_an_error_class_of_ours_may_say_its_exit_code(command, capsys):
    class Differs(RuntimeError):
        exit_code = 1

    Differs.__module__ = "trainer.parity"

    def action(args):
        raise Differs("3 tokens differ")

    command(action)
    assert run("boom", capsys=capsys) == (1, "", "isomodel: 3 tokens differ\n")


def test_a_fault_of_the_program_keeps_its_traceback(command):
    def action(args):
        raise KeyError("a fault")

    command(action)
    with pytest.raises(KeyError):
        cli.main(["boom"])


def test_ctrl_c(command, capsys):
    def action(args):
        raise KeyboardInterrupt

    command(action)
    assert run("boom", capsys=capsys) == (130, "", "interrupted\n")


def test_overrides_on_both_sides_of_an_option(command, capsys):
    seen = []
    command(lambda args: seen.append((args.overrides, args.flag)))
    assert run("boom", "a=1", "--flag", "b=2", capsys=capsys)[0] == 0
    assert seen == [(["a=1", "b=2"], True)]


def test_a_reader_that_goes_away_is_no_error():
    script = "import sys; from isomodel import cli; sys.exit(cli.main(['train', 'configs/demo.yaml', '--check']))"
    command = f'{sys.executable} -c "{script}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() in ("0", "1") and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# The trainer's commands


def test_train_check_prints_every_default(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, _ = run("train", "configs/demo.yaml", "--check", "numerics=native", "train.steps=7", capsys=capsys)
    assert code == 0 and "mode: native" in out and "steps: 7" in out and "on_mismatch: record" in out


def test_train_names_every_fault_of_a_config(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {source: x.jsonl}\ntrian: {steps: 3}\noptimizer: {lr: fast}\n")
    code, out, err = run("train", str(path), "seed=-1", capsys=capsys)
    assert (code, out) == (2, "")
    for part in (str(path), "trian: unknown key; did you mean 'train'?", "optimizer.lr: must be", "seed: must be"):
        assert part in err


def test_plot_of_a_run_that_is_not_there(tmp_path, capsys):
    code, out, err = run("plot", str(tmp_path / "none"), capsys=capsys)
    assert (code, out) == (2, "") and "cannot be read" in err
