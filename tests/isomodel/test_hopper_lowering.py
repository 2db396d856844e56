"""The whole model on the Hopper kernels, lowered for CUDA on a CPU: layouts, shared memory and shapes fit, for every case."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isomodel import model, specs
from isomodel.batch import Batch, TrainPages
from isomodel.numerics import Numerics
from isomodel.rollout import EngineConfig, programs
from pallas_kernels import attention, gemm, mosaic, qk_norm_rope
from pallas_kernels.weight import Weight
from tests.isomodel import shapes
from tests.pallas_kernels import interpreter
from tests.pallas_kernels.base import same, spread


class Hopper(Numerics):
    """Numerics of a GPU process, as a CPU process lowers them."""

    impl = "hopper"


HOPPER = Hopper("iso", "hopper", "bfloat16")

SHORT = {"num_layers": 2, "max_positions": 512}
MODELS = {
    "smollm2": dataclasses.replace(shapes.SMOLLM2, **SHORT),
    "qwen3-0.6b": dataclasses.replace(shapes.QWEN3_06B, **SHORT),
}
SHAPES = programs.Shapes(num_pages=64, page_size=16, table_width=16, decode_steps=2, return_logits=True)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remat", [False, True], ids=["train", "remat"])
def test_training_lowers(name, remat):
    cfg, T, S, P = MODELS[name], 256, 3, 2
    shape = jax.ShapeDtypeStruct
    row = shape((T,), jnp.int32)
    batch = Batch(row, row, row, shape((S + 1,), jnp.int32), shape((S,), jnp.int32), shape((S, P), jnp.int32))
    masters = {n: shape(s.shape, jnp.float32) for n, s in specs.weight_specs(cfg).items()}
    params = programs.abstract_params(cfg, HOPPER)

    def loss(masters, params, batch, targets_T, inv_temp_T):
        hidden_TD, _ = model.forward(cfg, HOPPER, params, batch, TrainPages(6, 128), masters=masters, remat=remat)
        return model.logprobs(cfg, HOPPER, params, hidden_TD, targets_T, inv_temp_T, masters=masters).sum()

    text = lowered(jax.grad(loss), masters, params, batch, row, shape((T,), jnp.float32))
    assert text.count("mosaic_gpu") >= 10  # its kernels are there, each as a custom call


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_lower(name):
    cfg = MODELS[name]
    for step, args in (
        (programs.mixed_step, programs.mixed_arguments(cfg, HOPPER, SHAPES, 256, 8)),
        (programs.decode_loop, programs.decode_arguments(cfg, HOPPER, SHAPES, 8)),
    ):
        text = lowered(functools.partial(step, cfg, HOPPER, SHAPES), *args)
        assert text.count("mosaic_gpu") >= 8


def test_decode_lays_its_layers_out_and_prefill_does_not():
    cfg = MODELS["qwen3-0.6b"]
    for step, arguments, calls in (
        (programs.mixed_step, programs.mixed_arguments(cfg, HOPPER, SHAPES, 256, 8), 0),
        (programs.decode_loop, programs.decode_arguments(cfg, HOPPER, SHAPES, 8), cfg.num_layers),
    ):
        text = lowered(functools.partial(step, cfg, HOPPER, SHAPES), *arguments)
        assert text.count("call @one_layer(") == calls and text.count("func.func private @one_layer(") == bool(calls)


def test_decode_steps_share_prompts_where_the_engine_is_made_so(monkeypatch):
    cfg, seen, listed = MODELS["qwen3-0.6b"], [], attention.work_list
    monkeypatch.setattr(attention, "work_list", lambda *a, share=False, **o: seen.append(share) or listed(*a, share=share, **o))
    for share in (False, True):
        config = EngineConfig(max_seqs=8, max_model_len=256, share_prompts=share, chunk_tokens=256, decode_steps=2)
        sizes = programs.Shapes.of(dataclasses.replace(config, num_pages=64))
        jax.eval_shape(
            functools.partial(programs.mixed_step, cfg, HOPPER, sizes),
            *programs.mixed_arguments(cfg, HOPPER, sizes, 256, 8),
        )
        jax.eval_shape(
            functools.partial(programs.decode_loop, cfg, HOPPER, sizes), *programs.decode_arguments(cfg, HOPPER, sizes, 8)
        )
    assert seen == [False, False, False, True]


def primitives(jaxpr):
    """Names of what a program computes, and functions that it calls; not of what its loops, branches and kernels do."""
    for eqn in jaxpr.eqns:
        yield from primitives(eqn.params["jaxpr"]) if eqn.primitive.name == "jit" else [eqn.primitive.name]


@pytest.mark.parametrize("share", [False, True])
def test_attentions_lists_are_made_once_a_loop(share):
    """Whose making sums, and whose shortening in each step does not."""
    cfg, sizes = MODELS["qwen3-0.6b"], dataclasses.replace(SHAPES, share_prompts=share)
    step = functools.partial(programs.decode_loop, cfg, HOPPER, sizes)
    program = jax.make_jaxpr(step)(*programs.decode_arguments(cfg, HOPPER, sizes, 256))
    (loop,) = (eqn for eqn in program.eqns if eqn.primitive.name == "while")
    assert "reduce_sum" in set(primitives(program))
    assert "reduce_sum" not in set(primitives(loop.params["body_jaxpr"]))


@pytest.mark.parametrize("T, layer, kernels", [(8, 1, 2), (512, 1, 2), (8, None, 3)], ids=["decode", "prefill", "training"])
def test_inference_multiplies_and_gates_in_one_kernel(T, layer, kernels):
    cfg = MODELS["smollm2"]
    D, F = cfg.hidden_size, cfg.intermediate_size
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    context = model.LayerContext(cfg, HOPPER, None, None, None, None, layer)

    def mlp(x_TD, gate_up, down):
        return model.DenseMLP({"gate_up": Weight(gate_up), "down": Weight(down)})(x_TD, context)

    assert lowered(mlp, shape(T, D), shape(2, F, D), shape(D, F)).count("@mosaic_gpu_v2") == kernels


def mixer(T: int, layer: int | None):
    """(the part of attention that projects and rotates T rows, its arguments); with `looks`, for someone who looks."""
    cfg = dataclasses.replace(MODELS["smollm2"], hidden_size=64, num_heads=2, num_kv_heads=1)
    weight = spread(np.random.default_rng(0), 1, 4, 64, 64, binades=2)
    x = spread(np.random.default_rng(1), T, 64, binades=2)
    place = jnp.arange(T, dtype=jnp.int32)
    pages = jnp.zeros((2, 2 * -(-T // 16), 16, 1, 64), jnp.bfloat16)
    batch = Batch(place, place, place, None, None, None)
    own = TrainPages(-(-T // 16), 16) if layer is None else None

    def run(x, weight, pages, looks=False):
        rotations = qk_norm_rope.rotations(
            place, theta=cfg.rope_theta, max_positions=512, head_dim=64, dtype=jnp.bfloat16
        )
        context = model.LayerContext(cfg, HOPPER, batch, rotations, own, None, layer)
        with (
            model._tapping(looks),
            mock.patch.object(attention, "attention", lambda q_THd, *_, **__: q_THd),
            mock.patch.object(gemm, "tree", lambda o_THd, *_, **__: o_THd),
        ):
            return model.Attention({"qkv": Weight(weight), "o": None}, False)(x, (pages, pages), context)

    return run, (x, weight, pages)


@pytest.mark.parametrize("T, layer, kernels", [(8, 1, 1), (512, 1, 2), (8, None, 2)], ids=["decode", "prefill", "training"])
def test_inference_projects_and_rotates_in_one_kernel(T, layer, kernels):
    run, args = mixer(T, layer)
    assert lowered(run, *args).count("@mosaic_gpu_v2") == kernels


def check_one_kernel_against_two():
    """Rows and pages, and those that someone who looks gets."""
    run, args = mixer(8, 1)
    with mosaic.interpreted():
        assert same(*(jax.tree.leaves(run(*args, looks)) for looks in (False, True)))


def test_one_kernel_has_the_bits_of_two():
    interpreter.run("from tests.isomodel import test_hopper_lowering as t; t.check_one_kernel_against_two()")
