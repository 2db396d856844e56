"""benchmarks.decode_profile: what is a layer's, what the rest of a step, and the gaps, from a trace made by hand."""

import pytest

from benchmarks import decode_profile
from benchmarks.decode_profile import STEPS, Kernel, summary


def made(layers: int, steps: int) -> list[Kernel]:
    """Kernels of 1 us (the second GEMM of a layer 3, attention 5, logits 50), each 0.5 us after the last."""
    kernels, at = [], 0.0

    def run(name: str, duration: float = 1.0):
        nonlocal at
        kernels.append(Kernel(at, duration, f"{name}_mosaic_gpu_kernel"))
        at += duration + 0.5

    for _ in range(steps):
        for _ in range(layers):
            run("norm"), run("gemm"), run("attention", 5.0), run("norm"), run("gemm", 3.0)
        run("norm"), run("logits", 50.0), run("sample_scan", 2.0)
    return kernels


@pytest.mark.parametrize("steps", [1, STEPS], ids=["a loop shown once", "every step"])
def test_layers_rest_and_gaps(steps):
    found = summary(made(4, steps), 4)
    assert found["layer"] == {"norm (1)": 1, "gemm (1)": 1, "attention": 5, "norm (2)": 1, "gemm (2)": 3}
    assert found["rest"] == {"logits": 50, "sample_scan": 2, "norm": 1}
    assert found["layer_us"] == 11 and found["layer_kernels"] == 5 and found["launches"] == 23
    text, ids = decode_profile.table("m", found), [row["id"] for row in decode_profile.rows("m", 256, found)]
    assert "attention" in text and ids[:2] == ["decode-m-256-layer-kernels", "decode-m-256-layer"]
    if steps == 1:
        assert found["gap_us"] is found["step"] is found["idle"] is None and "idle" not in text and len(ids) == 2
        return
    assert found["gap_us"] == pytest.approx(0.5) and found["step"] == pytest.approx(4 * 13.5 + 53 + 2 * 0.5)
    assert found["idle"] == pytest.approx(22 * 0.5 / found["step"])
    assert ids[2:] == ["decode-m-256-step", "decode-m-256-gap"]


def test_numbers_of_a_compilation_are_no_part_of_a_name():
    assert decode_profile.short("loop_add_fusion_12") == "loop_add_fusion"
    assert decode_profile.short("gemm_small_2_mosaic_gpu_kernel") == "gemm_small"


def test_a_trace_without_sampling_is_refused():
    with pytest.raises(RuntimeError, match="no kernel sample_scan"):
        summary(made(4, 1)[:-1], 4)


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        decode_profile.main([str(tmp_path / "out.json"), "qwen3-1b"])
    assert "choose from qwen3-0.6b" in capsys.readouterr().err
