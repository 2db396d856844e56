"""`isomodel verify`: the bit gates on a user's model, each with proof that its hazard happened."""

from isomodel.verify.command import add_commands
from isomodel.verify.subject import GateResult, Subject

__all__ = ["GateResult", "Subject", "add_commands"]
