"""The execution contract: entries of what runs, identities over them, and their comparison."""

from isomodel.contract.agreement import ContractMismatch, ContractWarning, agree, check
from isomodel.contract.cases import trace_cases
from isomodel.contract.contract import (
    CASES,
    CLAIMS,
    DROPPED_ON_UPDATE,
    FILE,
    Contract,
    ContractError,
    Identities,
    derive,
)
from isomodel.contract.diff import Difference, diff, render

__all__ = [
    "CASES",
    "CLAIMS",
    "DROPPED_ON_UPDATE",
    "FILE",
    "Contract",
    "ContractError",
    "ContractMismatch",
    "ContractWarning",
    "Difference",
    "Identities",
    "agree",
    "check",
    "derive",
    "diff",
    "render",
    "trace_cases",
]
