"""What the sections of a training config are made of: types with ranges, and defaults that depend on other fields."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
PageSize = Literal[1, 2, 4, 8, 16, 32, 64, 128]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def section(cls: type, shorthand: str | None = None):
    """A field that holds a section with its own defaults; `shorthand` names the field that a bare scalar sets."""
    return dataclasses.field(default_factory=cls, metadata={"shorthand": shorthand} if shorthand else {})


def fill(obj: Any, path: str, value: Any) -> None:
    """Fills in a None of a frozen dataclass under construction; sections on the way are replaced, never changed."""
    name, _, rest = path.partition(".")
    old = getattr(obj, name)
    if rest:
        inner = dataclasses.replace(old)
        fill(inner, rest, value)
        value = inner
    elif old is not None:
        return
    object.__setattr__(obj, name, value)
