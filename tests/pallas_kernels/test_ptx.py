"""The check of PTX finds a read that is too early, in a straight line and around a loop, and nothing else."""

from __future__ import annotations

import pathlib
import re

import pytest

from pallas_kernels import mosaic
from tests.pallas_kernels.ptx import early_reads

MULTIPLY = "{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, p, 1, 1, 0, 0; }"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"
READ, OTHER = "cvt.u64.u32 \t%rd3, %r1;", "add.s32 \t%r11, %r12, 1;"


def found(*lines: str) -> list[str]:
    return early_reads("\n".join([".visible .entry kernel(", ")", "{", *lines, "\tret;", "}"]))


@pytest.mark.parametrize(
    "lines, early",
    [
        ([MULTIPLY, COMMIT, OTHER, WAIT.format(0), READ], False),
        ([MULTIPLY, COMMIT, READ, WAIT.format(0)], True),
        ([MULTIPLY, READ, COMMIT, WAIT.format(0)], True),
        ([MULTIPLY, COMMIT, WAIT.format(1), READ], True),
        ([MULTIPLY, COMMIT, COMMIT, WAIT.format(1), READ], False),
        ([MULTIPLY, COMMIT, "// " + READ, WAIT.format(0)], False),
    ],
)
def test_in_a_line(lines, early):
    assert found(*lines) == ([READ] if early else [])


def test_around_a_loop():
    """The read stands before the products, and comes after them in the second trip."""
    loop = ["$L__BB0_1:", READ, MULTIPLY, COMMIT, "\t@%p1 bra \t$L__BB0_1;", WAIT.format(0)]
    assert found(*loop) == [READ]
    assert found(*loop[:-2], WAIT.format(0), loop[-2]) == []


def test_what_a_branch_leaves_out():
    """Nobody comes from the products to the block behind the jump."""
    lines = [MULTIPLY, COMMIT, "\tbra.uni \t$L__BB0_2;", "$L__BB0_1:", READ, "$L__BB0_2:", WAIT.format(0)]
    assert found(*lines) == []
    assert found("\t@%p1 bra \t$L__BB0_1;", *lines[:2], *lines[3:]) == [READ]


def test_every_accumulator_is_read_after_its_wait():
    """By its source, as CI has no compiler for it: what is not a store into one stands in `mosaic.here`."""
    read = re.compile(r"\w*acc\[\.\.\.\](?! = )|wgmma_accumulator_load\(|run_state\(")
    kernels = [path for path in pathlib.Path(mosaic.__file__).parent.rglob("hopper*.py") if "plgpu.wgmma" in path.read_text()]
    lines = [(path.name, line.strip()) for path in kernels for line in path.read_text().splitlines() if read.search(line)]
    assert len(kernels) >= 4 and len(lines) >= 6
    assert [line for line in lines if "mosaic.here" not in line[1]] == []
