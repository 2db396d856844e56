"""Device memory: how much there is, and a message that helps where it is too little."""

from __future__ import annotations

import dataclasses

import jax


class OutOfDeviceMemory(ValueError):
    """Something does not fit on the device; the message says what it needs, what is free, and what to change."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Of one device, in bytes.

    Attributes:
      device: its name. limit: what this process may take there. in_use: what it has taken.
    """

    device: str
    limit: int
    in_use: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.in_use)


def device_memory() -> DeviceMemory | None:
    """Of the default device; None where the device does not tell (a CPU does not)."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return DeviceMemory(str(device), stats["bytes_limit"], stats.get("bytes_in_use", 0))


def require(needed: int, what: str, advice: str) -> None:
    """Refuses what cannot fit; where the device does not tell its memory, nothing.

    Args:
      needed: bytes. what: that takes them. advice: what a user can change.

    Raises:
      OutOfDeviceMemory: more than is free.
    """
    memory = device_memory()
    if memory is not None and needed > memory.free:
        raise OutOfDeviceMemory(
            f"{what} needs {amount(needed)}, and {amount(memory.free)} of {amount(memory.limit)} are free on {memory.device}: {advice}"
            " (JAX takes XLA_PYTHON_CLIENT_MEM_FRACTION of the device, 0.75 unless you set it)"
        )


def amount(count: int) -> str:
    """Bytes for a person: whole bytes, and GiB beside them where there are many."""
    return f"{count:,} bytes" + (f" ({count / 2**30:.2f} GiB)" if count >= 2**27 else "")
