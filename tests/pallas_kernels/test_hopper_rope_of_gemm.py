"""qk_norm_rope inside the GEMM that feeds it, without a GPU: in the interpreter with race detection, and lowered for CUDA."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import gemm, mosaic, qk_norm_rope, registry
from pallas_kernels.gemm import hopper_small
from pallas_kernels.gemm.hopper_small import Schedule
from pallas_kernels.qk_norm_rope import hopper_epilogue, hopper_of_gemm
from tests.pallas_kernels import interpreter
from tests.pallas_kernels import rope_of_gemm_work as work
from tests.pallas_kernels.base import bits, same
from tests.pallas_kernels.rope_of_gemm_work import Case

LAYER = jnp.int32(1)

ALONE = (Case(9, 1, 2, 64, 128, 16, has_norm=False), Schedule(rows=128, tokens=16, stages=3, programs=1))
"""No norm, ragged tokens, two heads a program, which walks: each head is one warpgroup's."""
SHARED = {
    "two heads of 128 a program, which walks, past the end; loads shared": (
        Case(45, 1, 1, 128, 64, 16),
        Schedule(rows=256, tokens=40, stages=2, join=2, programs=1),
    ),
    "256": (Case(9, 1, 1, 256, 64, 128), Schedule(rows=256, tokens=16, stages=2)),
}
"""Heads of several warpgroups, which wait for each other."""


def interpreted(call, *args):
    with mosaic.interpreted():
        out = jax.tree.map(np.asarray, call(*args))
    assert not gpu_callbacks.get_races().races_found
    return out


def few(case: Case, schedule: Schedule):
    args = *work.operands(case), LAYER
    got = interpreted(work.one, case, schedule, "hopper", *args)
    qkv, *want = interpreted(work.two, case, schedule, *args)
    assert same(got, want)
    assert not same(got[1:], args[5:7]), "control: something was written"
    assert np.isfinite(got[0].astype(np.float32)).all() and len(np.unique(bits(got[0]))) > 100
    for mine, reference in zip(got, work.turned("reference", qkv, *args[2:]), strict=True):
        steps = np.abs(bits(mine).astype(np.int64) - bits(reference).astype(np.int64))
        # bf16 roundings that the order of a norm's sum tips over
        assert steps.max() <= case.has_norm and (steps > 0).mean() < 2e-3


def test_the_bits_of_two_kernels():
    few(*ALONE)


def test_the_bits_of_two_kernels_by_programs_whose_warpgroups_wait_for_each_other():
    interpreter.run("from tests.pallas_kernels import test_hopper_rope_of_gemm as t; [t.few(*c) for c in t.SHARED.values()]")


MODELS = {"smollm2": (3, 3, 64, 576, False), "qwen3-0.6b": (8, 2, 128, 1024, True), "qwen3-8b": (8, 4, 128, 4096, True)}
"""K, G, d, D, has_norm."""


def shaped(model: str, T: int, page: int = 16) -> Case:
    K, groups, d, D, has_norm = MODELS[model]
    return Case(T, K, groups, d, D, page, has_norm)


@pytest.mark.parametrize(
    "model, T, kernels",
    [
        *(("smollm2", T, 1) for T in (1, 16, 256)),
        *(("qwen3-0.6b", T, kernels) for T, kernels in ((8, 2), (16, 1), (256, 1))),
        *(("qwen3-8b", T, kernels) for T, kernels in ((16, 2), (64, 1), (256, 1), (300, 2))),
    ],
)
def test_one_kernel_has_the_entries_of_two(model, T, kernels):
    case = shaped(model, T)
    with registry.recording() as entries:
        text = work.lowered(case, work.one, None, "hopper")
    assert text.count("@mosaic_gpu_v2") == kernels and text.count("output_operand_alias<") == 2
    assert "scatter" not in text
    x, w, positions, *norms, k, v, slots = work.shapes(case)

    def two(x, w, *rows):
        qkv = gemm.chain(x, w[1], region=work.REGIONS[0], impl="hopper").reshape(T, case.K, case.groups + 2, case.d)
        norms = [None if n is None else n[1] for n in rows[1:3]]
        return qk_norm_rope.to_pages(
            qkv, rows[0], *norms, *rows[3:], LAYER, **work.OPTIONS, region=work.REGIONS[1], impl="hopper"
        )

    with registry.recording() as of_two:
        jax.eval_shape(two, x, w, positions, *norms, k, v, slots)
    assert list(entries) == list(work.REGIONS) and entries == of_two


def schedules_of(d: int):
    """What the tables may choose for heads of d, each once."""
    own = (s for (order, _), lines in hopper_small.TABLE.items() if order == "chain" for _, s in lines if s.rows % d == 0)
    lines = (s for (of, _), lines in hopper_of_gemm.TABLE.items() if of == d for _, s in lines if s)
    return dict.fromkeys((*own, *lines))


@pytest.mark.parametrize("d", hopper_of_gemm.HEADS)
def test_every_schedule_lowers(d):
    """Of each number of tokens the one with most heads a program: others are the same epilogue in less memory."""
    case, most = Case(8, 3, 2, d, 256, 16), {}
    heads = hopper_epilogue.Heads(case.K, case.groups, d, case.T, work.OPTIONS["eps"], case.count * case.page)
    for s in schedules_of(d):
        smem = hopper_small.smem_bytes(s, 1, jnp.bfloat16, min(s.stages, 4), epilogue=heads)
        assert smem <= hopper_small.SMEM_BYTES, s
        most[s.tokens] = max(most.get(s.tokens, s), s, key=lambda s: s.rows)
    for s in most.values():
        case = dataclasses.replace(case, T=s.tokens * s.join - 3)
        assert "mosaic_gpu" in work.lowered(case, work.one, s, "hopper")


def test_a_line_of_the_table_says_whether_it_is_one_kernel(monkeypatch):
    """With another bucket's and another head dim's lines left alone; a line's steps of K are made to fit."""
    two_lines = ((66, None), (0, Schedule(rows=128, tokens=64, k_tile=128, stages=4)))
    monkeypatch.setitem(hopper_of_gemm.TABLE, (128, 256), two_lines)
    assert hopper_of_gemm.choice(256, 4096, 1024, 128) is None
    assert hopper_of_gemm.choice(256, 6144, 4096, 128) is two_lines[1][1]
    assert hopper_of_gemm.choice(129, 6144, 576, 128) == Schedule(rows=128, tokens=64, k_tile=64, stages=8)
    assert hopper_of_gemm.choice(128, 4096, 1024, 128) is hopper_of_gemm.TABLE[128, 128][0][1]
    assert hopper_of_gemm.choice(64, 960, 576, 64) == hopper_small.schedule_for(64, 960, 576, 1)
    assert hopper_of_gemm.choice(8, 4096, 1024, 128) is None, "no program of the GEMM's own holds a head"


def test_faults_are_named():
    case = Case(8, 1, 1, 128, 128, 16)
    args = *work.operands(case), LAYER
    with pytest.raises(ValueError, match="must hold whole ones of the epilogue's"):
        work.one(case, Schedule(rows=64, tokens=8, stages=2), "hopper", *args)
    with pytest.raises(ValueError, match="do not share K"):
        work.one(case, None, "hopper", args[0][:, :64], *args[1:])
    with pytest.raises(registry.Unsupported, match="multiplies bfloat16, got float32"):
        work.one(case, None, "hopper", *(x.astype(jnp.float32) for x in args[:2]), *args[2:])
