"""ServerLimits: how much one client, and all together, may ask for."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds that are checked before the engine is asked.

    Attributes:
      body_bytes: of a request's body. body_seconds: until it must have arrived.
      prompt_tokens: of one prompt; None: what the engine's max_model_len leaves.
      prompts: in one request. n: samples of one prompt.
      requests: in flight at one time; more are answered with 429.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: int = 30
    prompt_tokens: int | None = None
    prompts: int = 256
    n: int = 128
    requests: int = 256

    def __post_init__(self):
        """Raises ValueError listing every field that is out of range."""
        faults = [
            f"{field.name}={value!r} must be an integer >= 1"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and (not isinstance(value, int) or value < 1)
        ]
        if faults:
            raise ValueError("server limits: " + "; ".join(faults))
