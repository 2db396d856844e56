"""Whether two contracts allow what is to be done: exchange tokens, or go on from a saved run."""

from __future__ import annotations

import dataclasses
import warnings

from isomodel.contract.contract import CASES, Contract, ContractError, check_cases
from isomodel.contract.diff import Difference, diff


class ContractMismatch(ContractError):
    """Two contracts that must agree do not.

    Attributes:
      differences: all of them, the first entry that differs first.
    """

    def __init__(self, message: str, differences: list[Difference]):
        super().__init__(message)
        self.differences = differences


class ContractWarning(UserWarning):
    """Two contracts differ where they may."""


def _refuse(a: Contract, b: Contract, allow_numerical_change: bool = False) -> list[Difference]:
    """All differences between two contracts, if they are of a kind that does not matter.

    Raises:
      ContractMismatch: they differ in semantics, or in numerics without `allow_numerical_change`.
    """
    differences = diff(a, b)
    hard = [d for d in differences if d.identity == "semantic"]
    if not hard and not allow_numerical_change:
        hard = [d for d in differences if d.identity == "numerical"]
    if hard:
        more = f"\n  and {len(hard) - 20} more" if len(hard) > 20 else ""
        raise ContractMismatch(
            f"the {hard[0].identity} contract differs; first: {hard[0]}"
            + "".join(f"\n  {d}" for d in hard[1:20])
            + more,
            differences,
        )
    return differences


def check(saved: Contract, current: Contract, allow_numerical_change: bool = False) -> list[Difference]:
    """Whether a program with contract `current` may go on from what one with `saved` left.

    Args:
      saved: contract beside the checkpoint, or of the program at the other end.
      current: what this program runs.
      allow_numerical_change: go on although the arithmetic differs; the bits will, too.

    Returns:
      The differences that it passed over, each told by a ContractWarning as well.

    Raises:
      ContractMismatch: they differ in semantics, or in numerics without `allow_numerical_change`.
    """
    differences = _refuse(saved, current, allow_numerical_change)
    for d in differences:
        warnings.warn(f"contract differs from the saved one: {d}", ContractWarning, stacklevel=2)
    return differences


def agree(*contracts: Contract) -> Contract:
    """One contract out of those of programs that are to exchange tokens: a trainer's and an engine's, each derived from
    what that program runs.

    Returns:
      All their entries under one identity; deployments side by side.

    Raises:
      ContractMismatch: they compute something else, or in another way; the message begins with the first entry that
        differs.
      ContractError: a region that one has, the other lacks.
    """
    first = contracts[0]
    entries = {region: dict(by_case) for region, by_case in first.entries.items()}
    for other in contracts[1:]:
        _refuse(_shared(first, other), _shared(other, first))
        for region, by_case in other.entries.items():
            entries.setdefault(region, {}).update(by_case)
    order = {case: i for i, case in enumerate(CASES)}
    merged = dataclasses.replace(
        first,
        entries={r: dict(sorted(by_case.items(), key=lambda kv: order[kv[0]])) for r, by_case in entries.items()},
        dropped_on_update=list(dict.fromkeys(s for c in contracts for s in c.dropped_on_update)),
        deployment={"+".join(c.cases): c.deployment for c in contracts},
    )
    check_cases(merged)
    return merged


def _shared(contract: Contract, other: Contract) -> Contract:
    """`contract` less deployment and the regions that `other` lacks (`check_cases` judges those)."""
    entries = {region: by_case for region, by_case in contract.entries.items() if region in other.entries}
    return dataclasses.replace(contract, entries=entries, deployment={})
