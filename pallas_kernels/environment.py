"""What reaches the bits besides our own code: XLA flags, compiler, machine. Set before JAX starts, checked, described.

XLA reads XLA_FLAGS once a process, so one process has one numerics: "iso" (our flags) or "native" (XLA's own defaults).
`setup` runs when pallas_kernels is imported and puts the flags of iso in XLA_FLAGS; `use` settles the mode before the
first computation, which is what a command line calls; `check` refuses to go on under other flags than the contract's.

A program that does not go through our command line chooses native by ISOMODEL_NUMERICS=native in its environment.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess

import jax
from jax._src import xla_bridge
from jax._src.lib import cuda_path, xla_client

MODES = ("iso", "native")

PINNED = {
    # f32 -> bf16 -> f32 may not be elided: a rounding point is part of the contract.
    "xla_allow_excess_precision": "false",
    # One algorithm, whichever process compiles: no timing picks it, no atomics add in it.
    "xla_gpu_deterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
    # XLA's defaults, pinned so that a user's flags cannot undo them: reassociation, NaN-losing min and max.
    "xla_cpu_enable_fast_math": "false",
    "xla_cpu_enable_fast_min_max": "false",
    "xla_gpu_enable_fast_min_max": "false",
}
"""XLA flags of iso numerics."""

FASTER = {
    # XLA runs a kernel a second time to write its result into a loop's stack, where the result has another reader too: in a
    # training step every kernel whose result the backward keeps.
    "xla_gpu_enable_dynamic_slice_fusion": "false",
    # A loop's stacks are written whole; XLA fills them with zeros before.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": "true",
}
"""XLA flags that reach time and no bits: set where the user's do not say otherwise."""

_ONE_GRAPH = {
    # XLA's default commands, and loops and conditionals. Otherwise the host decides each of those, and the device waits for it.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    # A loop of known length is laid out in the graph. Otherwise each of its trips costs 3 us.
    "xla_gpu_command_buffer_unroll_loops": True,
}

_CHANGED = ("xla_allow_excess_precision", "xla_gpu_deterministic_ops", "xla_gpu_autotune_level")
"""Those of PINNED that are not XLA's defaults: they tell which mode XLA was started in."""

_HARMLESS = ("xla_dump_", "xla_hlo_profile", "xla_detailed_logging", "xla_force_host_platform_device_count")
"""Prefixes of flags that reach no bits, so that they stay out of the description (devices do as the thread count)."""

_VARIABLE = "ISOMODEL_NUMERICS"
_ADDED = "ISOMODEL_XLA_FLAGS"  # what `setup` put into XLA_FLAGS: a child process can tell it from the user's

_late = False  # JAX's backends were there before our flags


class EnvironmentFault(RuntimeError):
    """The process cannot keep the contract's bits; the message lists every fault and what to do."""


def parse_flags(text: str) -> dict[str, str]:
    """{name: value} of an XLA_FLAGS string, by XLA's own rules: the last of a name wins, a bare --name is true, and a
    text that does not start with "-" names a file that holds the flags.

    Raises:
      EnvironmentFault: the file cannot be read, or a word is no flag.
    """
    text = text.strip()
    if text and not text.startswith("-"):
        try:
            text = pathlib.Path(text).read_text()
        except OSError as e:
            raise EnvironmentFault(f"XLA_FLAGS names the file {text!r}, which cannot be read: {e}") from e
    flags = {}
    for word in shlex.split(text):
        if not word.startswith("--"):
            raise EnvironmentFault(f"XLA_FLAGS holds {word!r}, which is no flag; write --name=value")
        name, equals, value = word[2:].partition("=")
        value = value if equals else "true"
        if PINNED.get(name) in ("true", "false"):
            value = {"1": "true", "0": "false"}.get(value.lower(), value.lower())
        flags[name] = value
    return flags


def one_graph() -> dict[str, str | bool]:
    """Compiler options with which a program is one CUDA graph, its loops and conditionals inside: for programs that are run
    often and take milliseconds. They reach no bits. A user's XLA flags on the same win."""
    theirs = user_flags()
    return {name: value for name, value in _ONE_GRAPH.items() if name not in theirs}


def user_flags() -> dict[str, str]:
    """The flags of XLA_FLAGS less those that `setup` added, here or in a parent process."""
    return parse_flags(_split()[0])


def _split() -> tuple[str, str]:
    """XLA_FLAGS in two: the user's own text, and what `setup` added ("" where the variable was set anew since)."""
    text, added = os.environ.get("XLA_FLAGS", ""), os.environ.get(_ADDED, "")
    return (text.removesuffix(added), added) if added and text.endswith(added) else (text, "")


def _restore(theirs: str, ours: str = "") -> None:
    """Sets XLA_FLAGS to the user's text and ours behind it, or unsets it."""
    for variable, value in (("XLA_FLAGS", theirs + ours), (_ADDED, ours)):
        os.environ.pop(variable, None)
        if value:
            os.environ[variable] = value


def contradictions() -> list[str]:
    """The user's flags that say other than PINNED, one message each."""
    return [
        f"XLA_FLAGS has --{name}={value}, and iso numerics needs --{name}={PINNED[name]}: remove it, or run with "
        "numerics=native"
        for name, value in user_flags().items()
        if PINNED.get(name, value) != value
    ]


def requested_mode() -> str:
    """The mode that ISOMODEL_NUMERICS asks for; iso when it is not set.

    Raises:
      EnvironmentFault: it is set to something else.
    """
    mode = os.environ.get(_VARIABLE) or "iso"
    if mode not in MODES:
        raise EnvironmentFault(f"{_VARIABLE}={mode!r}; choose one of {', '.join(MODES)}, or unset it")
    return mode


def setup() -> None:
    """Puts PINNED and FASTER into XLA_FLAGS unless ISOMODEL_NUMERICS=native; runs at import and refuses nothing by itself.

    A user's own contradicting flag is left as it is, for `check` to name.
    """
    global _late
    if requested_mode() == "native":
        _restore(_split()[0])
        return
    theirs, ours = _split()
    missing = {name: value for name, value in (PINNED | FASTER).items() if name not in user_flags()}
    if ours or not missing:
        return
    if xla_bridge.backends_are_initialized():
        _late = any(name in PINNED for name in missing)
        return
    if theirs.strip() and not theirs.strip().startswith("-"):  # a file of flags takes no more words behind its name
        theirs = " ".join(shlex.quote(f"--{name}={value}") for name, value in user_flags().items())
    _restore(theirs, "".join(f" --{name}={value}" for name, value in missing.items()))


def use(mode: str) -> None:
    """Settles the numerics of this process, before JAX computes anything. Calling it again with the same mode is free.

    Raises:
      EnvironmentFault: ISOMODEL_NUMERICS says otherwise, the user's XLA_FLAGS contradict the contract, or XLA has
        already read the flags of the other mode.
    """
    if mode not in MODES:
        raise EnvironmentFault(f"numerics mode {mode!r}; choose one of {', '.join(MODES)}")
    if os.environ.get(_VARIABLE) and requested_mode() != mode:
        raise EnvironmentFault(
            f"{_VARIABLE}={requested_mode()} in the environment, and this run asks for numerics={mode}: make them agree"
        )
    if mode == "iso":
        setup()
        check()
        return
    theirs, ours = _split()
    started = bool(ours) and xla_bridge.backends_are_initialized()
    _restore(theirs)
    asked = user_flags()
    if started or any(name not in asked and in_force()[name] == PINNED[name] for name in _CHANGED):
        _restore(theirs, ours)
        raise EnvironmentFault(
            "numerics=native needs a process of its own, under XLA's default flags, and XLA has read iso's here: "
            f"start a new process with {_VARIABLE}=native"
        )
    os.environ[_VARIABLE] = "native"  # and so in child processes


def environ_for(mode: str) -> dict[str, str]:
    """A copy of this process's environment variables for a child process that computes in `mode`."""
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", _ADDED)}
    theirs, _ = _split()
    return environ | ({"XLA_FLAGS": theirs} if theirs else {}) | {_VARIABLE: mode}


@functools.cache
def in_force() -> dict[str, str]:
    """{name: value} of PINNED's flags as XLA has them now; makes XLA read XLA_FLAGS if it had not."""
    # jaxlib offers no public way to ask; the options print as a protocol buffer's text, one `name: value` a line.
    options = xla_client.CompileOptions()  # kept alive: its parts point into it
    build = options.executable_build_options
    text = str(build.debug_options)
    values = dict(re.findall(r"^(xla_\w+): (\S+)$", text, re.MULTILINE))
    # A field that was never set does not print; XLA takes it as the type's zero.
    return {name: values.get(name, "0" if pinned.isdigit() else "false") for name, pinned in PINNED.items()}


def faults() -> list[str]:
    """Why this process cannot keep the bits of iso numerics; empty if it can."""
    if requested_mode() == "native":
        return [f"{_VARIABLE}=native: this process runs under XLA's own flags; unset it for iso numerics"]
    found = contradictions()
    if not found:
        wrong = [f"--{name}={PINNED[name]}" for name, value in in_force().items() if value != PINNED[name]]
        if wrong or _late:
            found.append(
                "XLA was started without " + " ".join(wrong or [f"--{n}={v}" for n, v in PINNED.items()]) + ": import "
                "isomodel before JAX computes anything, or put these into XLA_FLAGS before the process starts"
            )
    if jax.config.jax_enable_x64:
        found.append("jax_enable_x64 is on, and no test covers iso numerics under it: turn it off")
    if jax.config.jax_disable_jit:
        found.append("jax_disable_jit is on, and it compiles every operation by itself: turn it off")
    return found


def check() -> None:
    """Refuses to compute in iso numerics where its flags are not in force.

    Raises:
      EnvironmentFault: with all faults.
    """
    if found := faults():
        raise EnvironmentFault("this process cannot keep the contract's bits:\n" + "\n".join(f"  - {f}" for f in found))


def cpu_threads() -> int:
    """Threads of XLA's CPU client: PJRT_NPROC or NPROC if set, else the CPUs that the process may run on; at least one
    a virtual device (xla_force_host_platform_device_count)."""
    devices = int(parse_flags(os.environ.get("XLA_FLAGS", "")).get("xla_force_host_platform_device_count", 1))
    for variable in ("PJRT_NPROC", "NPROC"):
        if (value := os.environ.get(variable, "")).isdigit():
            return max(int(value), devices)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(affinity, devices)


def _cpu_facts() -> dict:
    info = {}
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    except OSError:  # not Linux: the processor's name stands for its instruction set
        info["model name"] = platform.processor()
    flags = info.get("flags", info.get("Features", "")).split()
    floats = re.compile(r"s?sse|avx|fma|f16c|amx|asimd|neon|sve|sme\b|fphp|bf16|i8mm")
    caches = {}  # a CPU matrix product cuts K by the first two (the third cuts rows, which reorders nothing)
    for folder in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and level in "12":
            caches[f"L{level}"] = size
    model = [info.get(key) for key in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    return {
        "architecture": platform.machine(),
        "model": " ".join(m for m in model if m) or info.get("model name", "unknown"),
        "instructions": sorted(f for f in flags if floats.match(f)),
        "caches": caches,
        "threads": cpu_threads(),
    }


def _ptxas_version() -> str:
    """Last line of `ptxas --version` of the one that XLA finds: of CUDA's Python packages, else on PATH."""
    bundled = pathlib.Path(str(cuda_path), "bin", "ptxas")  # cuda_path is the text "None" where there are no packages
    ptxas = bundled if bundled.is_file() else shutil.which("ptxas")
    if not ptxas:
        return "not found"
    done = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=60)
    return (done.stdout.strip().splitlines() or [f"{ptxas} fails with exit code {done.returncode}"])[-1]


def _gpu_facts(device: jax.Device) -> dict:
    plugins = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(r"jax[-_]cuda\d+[-_](plugin|pjrt)", name):
            plugins[name.replace("_", "-")] = distribution.version
    return {
        "device": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "unknown")),
        "plugins": plugins,
        "platform_version": device.client.platform_version,
        "ptxas": _ptxas_version(),
    }


def describe() -> dict:
    """Every fact about this process that reaches the bits, as JSON values; starts JAX's backend if it was not.

    Keys: jax and jaxlib (versions), platform ("cpu" or "gpu"), xla_flags (PINNED as in force, and the user's others
    that are not known to be harmless), jax_config, and cpu or gpu (the machine). Python, flax and the like stay out.
    """
    device = jax.devices()[0]
    others = {n: v for n, v in user_flags().items() if n not in PINNED | FASTER | _ONE_GRAPH and not n.startswith(_HARMLESS)}
    config = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
    facts = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": device.platform,
        "xla_flags": dict(sorted((in_force() | others).items())),
        "jax_config": {name: getattr(jax.config, name) for name in config},
    }
    if device.platform == "cpu":
        return facts | {"cpu": _cpu_facts()}
    return facts | {"gpu": _gpu_facts(device)}
