"""Contracts: derived from what runs, changed by one constant, one flag or one ULP, and then refused."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rich.console

from isomodel import contract as c
from isomodel.config import ModelConfig
from isomodel.contract import cli
from isomodel.contract.canonical import digest, plain, readable
from isomodel.contract.contract import Contract
from isomodel.numerics import Numerics
from pallas_kernels import environment, registry
from pallas_kernels.attention import reference as attention_reference

CFG = ModelConfig(
    family="qwen3",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=256,
    tie_embeddings=False,
    qk_norm=True,
)
NUMERICS = Numerics(backend="reference")


def derived(cfg=CFG, numerics=NUMERICS, cases=c.CASES, **options) -> Contract:
    traces = c.trace_cases(cfg, numerics)
    return c.derive(cfg, numerics, {case: traces[case] for case in cases}, **options)


@pytest.fixture(scope="module")
def contract() -> Contract:
    return derived()


@pytest.fixture(scope="module")
def scored() -> Contract:
    """Of one case: quick to derive again after a change."""
    return derived(cases=("score",))


def changed(contract: Contract, region: str, case: str | None, **fields) -> Contract:
    """`contract` with other fields in one region's entry, in one case or in all."""
    entries = {r: {k: dict(e) for k, e in by_case.items()} for r, by_case in contract.entries.items()}
    for name in [case] if case else entries[region]:
        entries[region][name] |= fields
    return dataclasses.replace(contract, entries=entries)


# Canonical form


def test_floats_are_bits():
    assert plain(0.1) == "f64:3fb999999999999a"
    assert plain(np.float32(0.1)) == "f32:3dcccccd"
    assert plain(ml_dtypes.bfloat16(0.1)) == "bf16:3dcd"
    assert plain([np.int64(3), np.dtype("bfloat16"), jnp.float32, np.float64, True, None, (1,)]) == [
        3, "bfloat16", "float32", "float64", True, None, [1],
    ]  # fmt: skip


def test_one_ulp_changes_the_digest():
    eps = np.float32(1e-6)
    digests = {digest({"eps": x}) for x in (eps, np.nextafter(eps, np.float32(1)), np.float64(eps), 0.0, -0.0, 0)}
    assert len(digests) == 6
    assert digest({"a": 1, "b": 2.0}) == digest({"b": 2.0, "a": 1})
    assert digest({"x": float("nan")}) == digest({"x": float("nan")}) != digest({"x": None})


def test_what_has_no_form_is_refused_by_place():
    with pytest.raises(TypeError, match=r"value.table\[1\]: a contract holds no ndarray"):
        plain({"table": [1, np.zeros(3)]})
    with pytest.raises(TypeError, match="keys must be strings"):
        plain({1: 2})


def test_readable_shows_number_and_bits():
    assert readable("f32:358637bd") == "9.999999974752427e-07 (f32:358637bd)"
    assert readable((0.1).hex()) == "0.1 (0x1.999999999999ap-4)"
    assert readable({"a": [None, True, "chain"]}) == "{a: [none, true, chain]}"


# Deriving


def test_every_region_runs_in_every_case_with_one_entry(contract):
    assert contract.cases == c.CASES
    assert list(contract.entries) == [
        "embed", "mixer_norm", "qkv", "qk_norm_rope", "attention", "o_proj", "mlp_norm", "gate_up", "silu_mul",
        "down_proj", "final_norm", "lm_head", "logprob", "sample",
    ]  # fmt: skip
    for region, by_case in contract.entries.items():
        assert set(by_case) == ({"decode"} if region == "sample" else set(c.CASES)), region
        assert len({digest(entry) for entry in by_case.values()}) == 1, region
        assert by_case["decode"]["implementation"] in ("reference", "gather")


def test_a_function_that_ran_before_is_still_recorded():
    """JAX answers a second trace from its cache; a contract derived from nothing would agree with anything."""
    recorded = []

    @jax.jit
    def step(x):
        registry.record("region", {"version": 1})
        recorded.append(1)
        return x + 1

    step(jnp.ones(3))
    jax.eval_shape(step, jnp.ones(3))
    assert len(recorded) == 1  # the hazard: the second trace did not run the function
    for _ in range(2):
        with registry.recording() as entries:
            jax.eval_shape(step, jnp.ones(3))
        assert entries == {"region": {"version": 1}}


def test_a_case_that_records_nothing_is_refused():
    with pytest.raises(c.ContractError, match="case score recorded no region"):
        c.derive(CFG, NUMERICS, {"score": lambda: jax.eval_shape(lambda x: x + 1, jnp.ones(3))})
    with pytest.raises(c.ContractError, match="unknown case 'eval'"):
        c.derive(CFG, NUMERICS, {"eval": lambda: None})


def record_all(**entries):
    return lambda: [registry.record(region, entry) for region, entry in entries.items()]


def test_cases_that_differ_are_refused_in_iso_and_recorded_in_native(monkeypatch):
    norm, head = {"implementation": "x", "block": 1}, {"version": 1}
    traces = {
        "train": record_all(norm=norm, lm_head=head, logprob=head),
        "decode": record_all(norm=norm | {"block": 2}, lm_head=head, logprob=head),
    }
    with pytest.raises(c.ContractError, match="region norm differs between train and decode: block is 1 and 2"):
        c.derive(CFG, NUMERICS, traces)
    native = c.derive(CFG, Numerics(mode="native"), traces)
    assert native.entries["norm"]["decode"]["block"] == 2
    assert not native.claims["batch"]


def test_a_region_that_one_case_lacks_is_refused():
    full = {"norm": {"v": 1}, "lm_head": {"v": 1}, "logprob": {"v": 1}}
    body = {"norm": {"v": 1}}
    c.derive(CFG, NUMERICS, {"train": record_all(**full), "prefill": record_all(**body)})  # prefill may lack the head
    with pytest.raises(c.ContractError, match="region lm_head runs in train and not in decode"):
        c.derive(CFG, NUMERICS, {"train": record_all(**full), "decode": record_all(**body)})
    with pytest.raises(c.ContractError, match="region norm runs in train and not in prefill"):
        c.derive(CFG, NUMERICS, {"train": record_all(**full), "prefill": record_all(embed={"v": 1})})


# Tampering: one constant, one flag, one ULP


def refused(saved: Contract, current: Contract, identity: str, first: str):
    """Exactly `identity` changed, the diff begins with `first`, and check refuses and says so."""
    before, after = dataclasses.asdict(saved.identities), dataclasses.asdict(current.identities)
    assert [name for name in before if before[name] != after[name]] == [identity]
    assert str(c.diff(saved, current)[0]).startswith(first)
    with pytest.raises(c.ContractMismatch) as e:
        c.check(saved, current)
    assert first in str(e.value).splitlines()[0]
    assert e.value.differences == c.diff(saved, current)


def test_control_an_untouched_contract_is_accepted(contract):
    again = derived()
    assert again.identities == contract.identities
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c.check(contract, again) == []
    assert c.render(c.diff(contract, again)) == "no difference"


def test_one_constant_in_the_code(scored, monkeypatch):
    monkeypatch.setattr(attention_reference, "SPLIT", 1024)
    refused(scored, derived(cases=("score",)), "numerical", "numerical: attention / all cases / split: 2048 -> 1024")


def test_one_ulp_in_one_case(contract):
    eps = contract.entries["mixer_norm"]["decode"]["eps"]
    one_more = np.nextafter(float.fromhex(eps), 1).item().hex()
    tampered = changed(contract, "mixer_norm", "decode", eps=one_more)
    refused(contract, tampered, "numerical", "numerical: mixer_norm / decode / eps: 1e-06")


def test_one_ulp_in_the_model(scored):
    cfg = dataclasses.replace(CFG, rms_norm_eps=np.nextafter(CFG.rms_norm_eps, 1).item())
    current = derived(cfg, cases=("score",))
    assert current.identities.semantic != scored.identities.semantic
    assert current.identities.numerical != scored.identities.numerical  # the norms' entries carry it too
    with pytest.raises(c.ContractMismatch, match="semantic contract differs; first: semantic: model / rms_norm_eps"):
        c.check(scored, current)


def test_one_flag(scored, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    first = "numerical: environment / xla_flags / xla_cpu_max_isa: none -> AVX2"
    refused(scored, derived(cases=("score",)), "numerical", first)


def test_one_thread_more(scored, monkeypatch):
    monkeypatch.setenv("NPROC", str(scored.environment["cpu"]["threads"] + 1))
    refused(scored, derived(cases=("score",)), "numerical", "numerical: environment / cpu / threads")


def test_meaning_of_a_log_probability(contract):
    semantics = contract.semantics | {"logprob": contract.semantics["logprob"] | {"unit": "bits"}}
    current = dataclasses.replace(contract, semantics=semantics)
    refused(contract, current, "semantic", "semantic: logprob / unit: nats -> bits")


def test_numerical_change_passes_only_by_flag_and_is_told(contract):
    tampered = changed(contract, "attention", None, block=64)
    with pytest.warns(c.ContractWarning, match="attention / all cases / block: 128 -> 64"):
        passed = c.check(contract, tampered, allow_numerical_change=True)
    assert [d.path for d in passed] == [("attention", "all cases", "block")]
    semantics = contract.semantics | {"logprob": {}}
    with pytest.raises(c.ContractMismatch, match="semantic"):
        c.check(contract, dataclasses.replace(tampered, semantics=semantics), allow_numerical_change=True)


def test_deployment_warns(contract):
    moved = dataclasses.replace(contract, deployment=contract.deployment | {"devices": 8})
    assert moved.identities.numerical == contract.identities.numerical
    with pytest.warns(c.ContractWarning, match="deployment / devices: 1 -> 8"):
        c.check(contract, moved)


def test_compute_dtype_is_numerical_not_semantic(scored):
    other = derived(numerics=Numerics(backend="reference", compute_dtype="float32"), cases=("score",))
    assert other.identities.semantic == scored.identities.semantic
    assert str(c.diff(scored, other)[0]) == "numerical: numerics / compute_dtype: bfloat16 -> float32"


# Two programs


def test_trainer_and_engine_agree_on_one_identity(contract):
    trainer = derived(cases=("train", "score", "remat"), deployment={"microbatch": 8})
    engine = derived(cases=("prefill", "decode"), deployment={"slots": 16})
    both = c.agree(trainer, engine)
    assert both.identities.numerical == contract.identities.numerical == c.agree(engine, trainer).identities.numerical
    assert both.cases == c.CASES
    assert both.deployment == {"train+score+remat": {"microbatch": 8}, "prefill+decode": {"slots": 16}}


def test_which_cases_a_program_runs_is_no_part_of_the_identity(contract):
    """A run that is resumed with recomputation switched on has the same arithmetic."""
    remat, train = (derived(cases=(case, "score")) for case in ("remat", "train"))
    assert remat.cases != train.cases
    assert remat.identities == train.identities and c.diff(remat, train) == []
    one_differs = changed(train, "attention", "score", block=64)  # and one case that differs is
    assert one_differs.identities.numerical != train.identities.numerical
    assert [d.path for d in c.diff(train, one_differs)] == [("attention", "score", "block")]


def test_trainer_and_engine_that_differ_do_not_start(contract):
    trainer = derived(cases=("train",))
    engine = derived(cases=("prefill", "decode"))
    with pytest.raises(c.ContractMismatch, match="differs; first: .*attention / all cases / block: 128 -> 64"):
        c.agree(trainer, changed(engine, "attention", None, block=64))
    without = dataclasses.replace(engine, entries={r: e for r, e in engine.entries.items() if r != "silu_mul"})
    with pytest.raises(c.ContractError, match="region silu_mul runs in train and not in prefill, decode"):
        c.agree(trainer, without)
    elsewhere = dataclasses.replace(engine, environment=engine.environment | {"jaxlib": "0.11.1"})
    with pytest.raises(c.ContractMismatch, match="environment / jaxlib: 0.11.2 -> 0.11.1"):
        c.agree(trainer, elsewhere)


# Files


def test_file_round_trip(contract, tmp_path):
    contract.save(tmp_path / "contract.json")
    loaded = Contract.load(tmp_path / "contract.json")
    assert loaded == contract and loaded.identities == contract.identities
    assert list(loaded.entries) == list(contract.entries)  # the forward's order
    assert [p.name for p in tmp_path.iterdir()] == ["contract.json"]


def test_damaged_files_are_refused(contract, tmp_path):
    path = tmp_path / "contract.json"
    contract.save(path)
    whole = path.read_text()
    path.write_text(whole.replace('"block": 128', '"block": 64'))
    with pytest.raises(c.ContractError, match="changed after it was written: its numerical identity"):
        Contract.load(path)
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(c.ContractError, match="cannot be read as a contract"):
        Contract.load(path)
    path.write_text(json.dumps(json.loads(whole) | {"format": 99}))
    with pytest.raises(c.ContractError, match="has format 99"):
        Contract.load(path)
    path.write_text("{}")
    with pytest.raises(c.ContractError, match="no field `format`"):
        Contract.load(path)
    with pytest.raises(c.ContractError, match="missing.json"):
        Contract.load(tmp_path / "missing.json")


def test_a_failed_save_leaves_the_old_file(contract, tmp_path, monkeypatch):
    path = tmp_path / "contract.json"
    contract.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        changed(contract, "attention", None, block=64).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["contract.json"]


# Command line


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["contract", *argv])
    return args.run(args)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CFG.to_hf()))
    return str(folder)


def test_show_prints_every_region_case_and_identity(contract, model_folder, capsys, tmp_path):
    file = tmp_path / "saved.json"
    assert run("show", model_folder, "--backend", "reference", "--save", str(file)) == 0
    out = capsys.readouterr().out
    assert contract.identities.numerical[:20] in out and "prefill" in out and "attention" in out
    assert Contract.load(file).identities.numerical == contract.identities.numerical
    assert run("show", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_table_marks_an_entry_that_differs(contract):
    def row(shown: Contract) -> list[str]:
        console = rich.console.Console(file=io.StringIO(), width=200)
        cli.print_table(shown, console)
        line = next(line for line in console.file.getvalue().splitlines() if "attention" in line)
        return [cell.strip() for cell in line.split("│")[2:7]]

    assert len(set(row(contract))) == 1
    assert len(set(row(changed(contract, "attention", "decode", block=64)))) == 2


def test_diff_exits_1_when_different(contract, model_folder, tmp_path, capsys):
    contract.save(tmp_path / "contract.json")  # the folder is a run folder now
    assert run("diff", str(tmp_path), model_folder, "--backend", "reference") == 0
    assert capsys.readouterr().out == "no difference\n"
    changed(contract, "attention", None, block=64).save(tmp_path / "other.json")
    assert run("diff", str(tmp_path), str(tmp_path / "other.json")) == 1
    assert capsys.readouterr().out == "numerical: attention / all cases / block: 128 -> 64\n"


def test_names_that_stand_for_nothing(tmp_path):
    with pytest.raises(c.ContractError, match="neither contract.json"):
        run("show", str(tmp_path))


def test_iso_is_not_derived_under_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=true")
    with pytest.raises(environment.EnvironmentFault, match="--xla_allow_excess_precision=true"):
        derived(cases=("score",))
