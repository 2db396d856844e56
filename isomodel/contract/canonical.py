"""One text for one contract: JSON in which every float stands as its bits, and the SHA-256 of it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np

_HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+")
_FLOATS = {"f64": np.float64, "f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def plain(value: Any, where: str = "value") -> Any:
    """`value` in JSON's own types: floats as "f64:<hex of the bits>" (f32, bf16, f16 for numpy's), dtypes as names,
    tuples as lists, NumPy integers and booleans as Python's. Mapping order is kept.

    Raises:
      TypeError: it holds something that has no such form (an array: put its hash there), or a key that is no string.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    for name, dtype in _FLOATS.items():
        if isinstance(value, float if name == "f64" else dtype):  # np.float64 is a float
            return f"{name}:{np.asarray(value, dtype).tobytes()[::-1].hex()}"
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if isinstance(getattr(value, "dtype", None), np.dtype) and callable(value):  # jnp.float32 and the like
        return value.dtype.name
    if isinstance(value, dict):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where}: keys must be strings, not {bad[0]!r}")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{where}: a contract holds no {type(value).__name__}; give a number, a string or a hash")


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value` (sorted keys, no white space), as 64 hex digits."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def readable(value: Any) -> str:
    """A value of a contract for a person: floats as numbers, with their bits behind them."""
    if isinstance(value, str):
        name, _, bits = value.partition(":")
        if name in _FLOATS and bits and all(c in "0123456789abcdef" for c in bits):
            number = np.frombuffer(bytes.fromhex(bits)[::-1], _FLOATS[name])[0]
            return f"{number.item()!r} ({value})"
        if _HEX_FLOAT.fullmatch(value):  # float.hex, as the ops write their constants
            number = float.fromhex(value)
            bits = struct.pack(">d", number).hex()
            return f"{number!r} ({value})" if math.isfinite(number) else f"{number!r} (f64:{bits})"
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {readable(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(readable(item) for item in value) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
