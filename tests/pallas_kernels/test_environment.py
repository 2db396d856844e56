"""XLA's flags: put in force before JAX starts, refused when contradicted or too late, absent in native numerics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types

import jax
import pytest

from pallas_kernels import environment, registry

IN_FORCE = "from pallas_kernels import environment as e; import json; print(json.dumps(e.in_force()))"


def python(code: str, *prefix: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process without this one's XLA_FLAGS, numerics or thread settings."""
    dropped = ("XLA_FLAGS", "ISOMODEL_XLA_FLAGS", "ISOMODEL_NUMERICS", "NPROC", "PJRT_NPROC")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()} | variables
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def printed(code: str, *prefix: str, **variables: str):
    """The JSON that the code prints on its last line."""
    done = python(code, *prefix, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# In this process


def test_flags_are_in_force_here():
    environment.check()
    assert environment.in_force() == environment.PINNED


def test_parse_flags_by_xlas_rules(tmp_path):
    assert environment.parse_flags("--a=1 --b --a=2 '--c=x y'") == {"a": "2", "b": "true", "c": "x y"}
    assert environment.parse_flags("--xla_gpu_deterministic_ops=1") == {"xla_gpu_deterministic_ops": "true"}
    assert environment.parse_flags("") == {}
    file = tmp_path / "flags"
    file.write_text("--a=1\n--b=2\n")
    assert environment.parse_flags(str(file)) == {"a": "1", "b": "2"}
    with pytest.raises(environment.EnvironmentFault, match="names the file '/no/such'"):
        environment.parse_flags("/no/such")
    with pytest.raises(environment.EnvironmentFault, match="'b=2', which is no flag"):
        environment.parse_flags("--a b=2")


def test_all_contradictions_are_named_at_once(monkeypatch):
    flags = "--xla_allow_excess_precision=true --xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=1 --xla_dump_to=/"
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(environment.EnvironmentFault) as e:
        environment.check()
    assert "--xla_allow_excess_precision=true" in str(e.value) and "--xla_gpu_autotune_level=4" in str(e.value)
    assert "deterministic" not in str(e.value) and "dump" not in str(e.value)


@pytest.mark.parametrize("option", ["jax_enable_x64", "jax_disable_jit"])
def test_jax_options_that_no_test_covers_are_refused(option):
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        with pytest.raises(environment.EnvironmentFault, match=option):
            environment.check()
        with pytest.raises(environment.EnvironmentFault, match=option):
            registry.implementation("gemm", "reference")
        registry.implementation("gemm", "native")  # claims nothing
    finally:
        jax.config.update(option, before)
    registry.implementation("gemm", "reference")


def test_describe_is_json_and_the_same_every_time():
    facts = environment.describe()
    assert json.loads(json.dumps(facts)) == facts == environment.describe()
    assert facts["platform"] == "cpu" and facts["xla_flags"] == environment.PINNED
    assert facts["cpu"]["threads"] >= 1 and facts["cpu"]["instructions"]


def test_harmless_flags_stay_out_and_others_come_in(monkeypatch):
    before = environment.describe()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    assert environment.describe() == before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert environment.describe()["xla_flags"]["xla_cpu_max_isa"] == "AVX2"


def test_use_refuses_native_in_an_iso_process(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    with pytest.raises(environment.EnvironmentFault, match="needs a process of its own"):
        environment.use("native")
    environment.use("iso")
    with pytest.raises(environment.EnvironmentFault, match="mode 'fast'"):
        environment.use("fast")


def test_gpu_facts_name_device_plugins_and_ptxas(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "cuda_path", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    device = types.SimpleNamespace(
        device_kind="NVIDIA H200", compute_capability="9.0", client=types.SimpleNamespace(platform_version="cuda 13000")
    )
    facts = environment._gpu_facts(device)
    assert facts["ptxas"] == "not found" and facts["device"] == "NVIDIA H200" and facts["compute_capability"] == "9.0"
    for folder, version in ((tmp_path / "nothing", "on PATH V13.0.1"), (tmp_path / "bin", "packaged V13.0.2")):
        folder.mkdir()
        (folder / "ptxas").write_text(f"#!/bin/sh\necho NVIDIA\necho '{version}'\n")
        (folder / "ptxas").chmod(0o755)
        assert environment._gpu_facts(device)["ptxas"] == version  # CUDA's packages come before PATH


# Fresh processes


def test_jaxlib_accepts_every_pinned_flag_and_our_import_sets_them():
    assert printed(f"import pallas_kernels; {IN_FORCE}") == environment.PINNED
    assert printed(f"import jax, isomodel; {IN_FORCE}") == environment.PINNED  # jax imported first: not yet started


def test_control_xlas_defaults_are_others():
    defaults = printed(IN_FORCE, ISOMODEL_NUMERICS="native")
    assert defaults["xla_allow_excess_precision"] == "true" and defaults["xla_gpu_autotune_level"] != "0"
    assert defaults["xla_gpu_deterministic_ops"] == "false"


def test_a_started_backend_is_refused_with_what_to_do():
    code = """
        import jax
        jax.devices()
        from pallas_kernels import registry
        {}
    """
    done = python(code.format("registry.implementation('gemm', 'reference')"))
    assert done.returncode == 1
    assert "import isomodel before JAX computes anything" in done.stderr
    flags = " ".join(f"--{name}={value}" for name, value in environment.PINNED.items())
    assert python(code.format("registry.implementation('gemm', 'reference')"), XLA_FLAGS=flags).returncode == 0
    assert python(code.format("registry.implementation('gemm', 'native')")).returncode == 0


def test_a_users_contradiction_is_refused_and_native_takes_it():
    code = "import isomodel; from pallas_kernels import environment as e; e.use({!r})"
    done = python(code.format("iso"), XLA_FLAGS="--xla_gpu_autotune_level=3")
    assert done.returncode == 1 and "XLA_FLAGS has --xla_gpu_autotune_level=3" in done.stderr
    done = python(code.format("native"), XLA_FLAGS="--xla_gpu_autotune_level=3")
    assert done.returncode == 0, done.stderr


def test_a_users_other_flags_stay(tmp_path):
    code = "import isomodel, os, json; print(json.dumps(os.environ['XLA_FLAGS'].split()))"
    flags = printed(code, XLA_FLAGS="--xla_cpu_max_isa=AVX2")
    ours = environment.PINNED | environment.FASTER
    assert flags == ["--xla_cpu_max_isa=AVX2", *(f"--{n}={v}" for n, v in ours.items())]
    file = tmp_path / "flags"
    file.write_text("--xla_cpu_max_isa=AVX2\n")
    assert printed(code, XLA_FLAGS=str(file)) == flags
    assert printed(f"import isomodel; {IN_FORCE}", XLA_FLAGS=str(file)) == environment.PINNED


def test_a_user_may_set_what_reaches_time_alone():
    (name, value), *_ = environment.FASTER.items()
    other = f"--{name}={'true' if value == 'false' else 'false'}"
    code = """
        import isomodel, os, json
        from pallas_kernels import environment
        environment.use("iso")
        print(json.dumps([os.environ["XLA_FLAGS"], environment.describe()["xla_flags"]]))
    """
    flags, described = printed(code, XLA_FLAGS=other)
    assert other in flags.split() and f"--{name}={value}" not in flags.split()
    assert described == environment.PINNED


def test_a_step_is_one_graph_unless_the_users_flags_say_otherwise():
    code = """
        import isomodel, json, jax
        from pallas_kernels import environment
        options = environment.one_graph()
        jax.jit(lambda x: x + 1).lower(1).compile(compiler_options=options)  # JAX knows them
        print(json.dumps([options, environment.describe()["xla_flags"]]))
    """
    options, described = printed(code)
    assert options["xla_gpu_enable_command_buffer"].endswith("CONDITIONAL,WHILE") and len(options) == 2
    fewer, same = printed(code, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    assert list(fewer) == ["xla_gpu_command_buffer_unroll_loops"]
    assert described == same == environment.PINNED


def test_native_chosen_after_import_runs_under_xlas_defaults():
    """What `isomodel train CONFIG numerics=native` does: our packages are imported, then the configuration is read."""
    code = """
        import isomodel, os, json
        from pallas_kernels import environment as e
        e.use("native")
        assert "XLA_FLAGS" not in os.environ
        import jax
        jax.devices()
        e.use("native")  # free
        print(json.dumps([e.in_force(), e.faults()]))
    """
    in_force, faults = printed(code)
    assert in_force["xla_allow_excess_precision"] == "true"
    assert faults and "native" in faults[0]


def test_variable_and_run_must_agree():
    code = "import isomodel; from pallas_kernels import environment as e; e.use('iso')"
    done = python(code, ISOMODEL_NUMERICS="native")
    assert done.returncode == 1 and "make them agree" in done.stderr
    done = python("import isomodel", ISOMODEL_NUMERICS="fast")
    assert done.returncode == 1 and "ISOMODEL_NUMERICS='fast'" in done.stderr


@pytest.mark.parametrize("mode", environment.MODES)
def test_environ_for_a_child_of_either_numerics(mode):
    code = f"""
        import subprocess, sys
        from pallas_kernels import environment as e
        e.use("iso")
        environ = e.environ_for({mode!r})
        print(subprocess.run([sys.executable, "-c", {IN_FORCE!r}], env=environ, capture_output=True, text=True).stdout)
    """
    in_force = json.loads(python(code).stdout)
    assert (in_force == environment.PINNED) == (mode == "iso")


OBSERVED = """
    import json, os, time
    from pallas_kernels import environment as e
    import jax
    jax.devices()
    def observed():
        names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
        return sum(name == "tf_XLAEigen" for name in names)
    deadline = time.time() + 20
    while observed() != e.cpu_threads() and time.time() < deadline:
        time.sleep(0.05)  # threads take their names as they start
    print(json.dumps([e.cpu_threads(), observed()]))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc, which Linux has")
@pytest.mark.parametrize(
    ("prefix", "variables", "expected"),
    [
        ((), {}, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None),
        (("taskset", "-c", str(min(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else (), {}, 1),
        ((), {"NPROC": "5"}, 5),
        ((), {"PJRT_NPROC": "3", "NPROC": "5"}, 3),
        ((), {"NPROC": "2", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4),
    ],
)
def test_thread_count_is_what_xla_starts(prefix, variables, expected):
    assert printed(OBSERVED, *prefix, **variables) == [expected, expected]
