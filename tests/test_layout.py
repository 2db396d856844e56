"""The project's own shape: which package may import which, sizes, declared dependencies, the README's commands."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parent.parent
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "isomodel": {"isomodel", "pallas_kernels"},
    "trainer": {"trainer", "isomodel", "pallas_kernels"},
    "serving_bridge": {"serving_bridge", "isomodel", "pallas_kernels"},
}
DISTRIBUTION = {"yaml": "pyyaml", "orbax": "orbax-checkpoint"}
"""Distribution of an import whose names differ."""
OPTIONAL = {"wandb", "torch", "vllm", "triton"}
"""Imports of extras."""
MOST_LINES = 600


def modules(package: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in package.rglob("*.py") if "__pycache__" not in p.parts)


def imported(path: pathlib.Path) -> set[str]:
    """Top-level names that a file imports anywhere in it, by statement or by importlib.import_module("name")."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.JoinedStr) and argument.values:
                argument = argument.values[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                names.add(argument.value.split(".")[0])
    return names


def wrong_arrows(root: pathlib.Path) -> list[str]:
    return [
        f"{path.relative_to(root)} imports {name}"
        for package, allowed in ALLOWED.items()
        for path in modules(root / package)
        for name in sorted(imported(path) & (ALLOWED.keys() - allowed))
    ]


def test_arrows_point_one_way():
    assert wrong_arrows(ROOT) == []


def test_control_a_wrong_arrow_is_seen(tmp_path):
    for package in ALLOWED:
        (tmp_path / package).mkdir()
    (tmp_path / "isomodel" / "a.py").write_text("def f():\n    import trainer.loop\n")
    (tmp_path / "pallas_kernels" / "b.py").write_text("import importlib\nimportlib.import_module('isomodel.model')\n")
    assert wrong_arrows(tmp_path) == ["pallas_kernels/b.py imports isomodel", "isomodel/a.py imports trainer"]


def test_no_file_is_too_long_to_be_one_noun():
    folders = [*ALLOWED, "tests", "benchmarks", "scripts"]
    lengths = {p.relative_to(ROOT): len(p.read_text().splitlines()) for f in folders for p in modules(ROOT / f)}
    assert len(lengths) > 20
    assert {str(p): n for p, n in lengths.items() if n > MOST_LINES} == {}


def ops() -> list[str]:
    return sorted(p.parent.name for p in (ROOT / "pallas_kernels").glob("*/__init__.py"))


@pytest.mark.parametrize("op", ops())
def test_every_op_has_a_reference_and_tests(op):
    folder = ROOT / "pallas_kernels" / op
    if "registry.implementation(" in (folder / "__init__.py").read_text():  # else it is exact, and one for all devices
        assert (folder / "reference.py").is_file()
    names = {
        f"{node.module}.{alias.name}."
        for path in modules(ROOT / "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert any(name.startswith(f"pallas_kernels.{op}.") for name in names), f"no test imports pallas_kernels.{op}"


def test_no_unfinished_business():
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    paths = [p for f in (*ALLOWED, "tests", "benchmarks", "scripts") for p in modules(ROOT / f)]
    found = [str(p.relative_to(ROOT)) for p in paths if marks.search(p.read_text())]
    assert found == []


# Dependencies


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_import_is_declared():
    declared = {canonicalize_name(Requirement(d).name) for d in project()["dependencies"]}
    ours = ALLOWED.keys() | {"benchmarks", "tests"}
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in ALLOWED
        for path in modules(ROOT / package)
        for name in imported(path) - ours - OPTIONAL - sys.stdlib_module_names
        if canonicalize_name(DISTRIBUTION.get(name, name)) not in declared
    }
    assert undeclared == set()


def test_lock_holds_every_dependency_at_an_allowed_version():
    requirements = [Requirement(d) for d in project()["dependencies"] + project()["optional-dependencies"]["dev"]]
    versions = locked()
    wrong = [str(r) for r in requirements if not r.specifier.contains(versions.get(canonicalize_name(r.name), "0"))]
    assert wrong == []
    assert versions["jax"] == versions["jaxlib"] == "0.11.2"


def test_cpu_install_is_light():
    heavy = re.compile(r"torch|triton|tensorflow|nvidia|cuda|vllm|pandas|datasets")
    assert [name for name in locked() if heavy.match(name)] == []


# README


def commands() -> list[list[str]]:
    """Words of every command line in the README's shell blocks."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:console|sh|bash)\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line, comments=True) for line in lines]


def test_readme_commands_exist():
    assert ["make", "demo"] in commands() and ["make", "test"] in commands()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    usage = subprocess.run([sys.executable, "-m", "isomodel.cli", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert usage.returncode == 0, usage.stderr
    for words in commands():
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0].endswith("isomodel"):
            assert re.search(rf"\b{words[1]}\b", usage.stdout), words
        for word in words:
            if word.startswith(("configs/", "scripts/", "benchmarks/", "docs/", "tests/")):
                assert (ROOT / word).exists(), words


def test_readme_and_docs_links_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
