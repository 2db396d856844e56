"""Why a kernel's figure is short of its target, by result id; report.record asks for one where a target is missed."""

REASONS: dict[str, str] = {}
