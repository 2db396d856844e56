"""What differs between two contracts, in the order in which it matters, and what follows from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from isomodel.contract.canonical import readable
from isomodel.contract.contract import ALL_CASES, CASES, Contract


@dataclasses.dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
      identity: "semantic", "numerical" or "deployment"; "claims" for claims and for state dropped, which have none.
      path: where, outermost first: ("model", "rope_theta"), or ("attention", "decode", "block").
      left: the first contract's value; None where it has none.
      right: the second's.
    """

    identity: str
    path: tuple[str, ...]
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.identity}: {' / '.join(self.path)}: {readable(self.left)} -> {readable(self.right)}"


def _walk(left: Any, right: Any, path: tuple[str, ...]):
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left | right:
            yield from _walk(left.get(key), right.get(key), (*path, key))
    elif left != right or type(left) is not type(right):
        yield path, left, right


def diff(a: Contract, b: Contract) -> list[Difference]:
    """All differences: semantics, then numerics, then the entries in the order in which the forward reaches their
    regions, environment, claims, deployment."""
    found = [Difference("semantic", *d) for d in _walk(a.semantics, b.semantics, ())]
    found += [Difference("numerical", *d) for d in _walk(a.numerics, b.numerics, ("numerics",))]
    left, right = a.arithmetic, b.arithmetic
    for region in left | right:
        found += _diff_region(region, left.get(region, {}), right.get(region, {}))
    found += [Difference("numerical", *d) for d in _walk(a.environment, b.environment, ("environment",))]
    found += [Difference("claims", *d) for d in _walk(a.claims, b.claims, ("invariant over",))]
    dropped = _walk(a.dropped_on_update, b.dropped_on_update, ("dropped on a weight update",))
    found += [Difference("claims", *d) for d in dropped]
    return found + [Difference("deployment", *d) for d in _walk(a.deployment, b.deployment, ("deployment",))]


def _diff_region(region: str, a: dict[str, dict], b: dict[str, dict]) -> list[Difference]:
    """Differences of one region's entries; one that stands for all cases is compared with each of the other side's."""
    cases = (a.keys() | b.keys()) - {ALL_CASES} or {ALL_CASES}
    found = []
    for case in sorted(cases, key=(ALL_CASES, *CASES).index):
        left, right = (side.get(case, side.get(ALL_CASES)) for side in (a, b))
        found += [Difference("numerical", (region, case, *d[0]), *d[1:]) for d in _walk(left, right, ())]
    return found


def render(differences: list[Difference]) -> str:
    """One line a difference; "no difference" for none."""
    return "\n".join(str(d) for d in differences) or "no difference"
