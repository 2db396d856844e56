"""What /openapi.json says of bodies and answers: the models' own schemas, with the bounds that this server has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from isomodel.rollout.sampling_params import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE
from isomodel.rollout.server.errors import ApiError
from isomodel.rollout.server.limits import ServerLimits
from isomodel.rollout.server.requests import Strict

Json = dict[str, Any]

BOUNDS: dict[str, Json] = {
    "temperature": {"anyOf": [{"const": 0}, {"minimum": MIN_TEMPERATURE, "maximum": MAX_TEMPERATURE}]},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 0, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": 0, "maximum": MAX_SEED},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "messages": {"minItems": 1},
    "n": {"minimum": 1},
    "stream_options": {"properties": {"include_usage": {"type": "boolean"}}, "additionalProperties": False},
    "version": {"minimum": 1, "maximum": 2**31 - 1},
}
ALTERNATIVES = ("logprobs", "top_logprobs")
PROMPTS = ("prompt", "prompt_ids")
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body(
    cls: type[Strict],
    *,
    name: str = "",
    vocab_size: int = 1,
    prompt_limit: int = 1,
    top_logprobs: int = 0,
    limits: ServerLimits = ServerLimits(),
) -> Json:
    """`requestBody` of a route that takes a `cls`.

    Args:
      name: of the served model. vocab_size, prompt_limit: of its token ids and prompts.
      top_logprobs: most alternatives. limits: how much may be asked for.
    """
    schema = cls.model_json_schema()
    fields: dict[str, Json] = schema["properties"]
    for field, bounds in BOUNDS.items():
        if field in fields:
            fields[field] |= bounds
    for field in fields.keys() & set(ALTERNATIVES):
        for node in _nodes(fields[field], "integer"):
            node |= {"minimum": 0, "maximum": top_logprobs}
    for field in fields.keys() & {*PROMPTS, "stop_token_ids"}:
        for node in _nodes(fields[field], "integer"):
            node |= {"minimum": 0, "maximum": vocab_size - 1}
    for field in fields.keys() & set(PROMPTS):
        for node in _nodes(fields[field], "array"):
            node |= {"minItems": 1, "maxItems": prompt_limit if node["items"].get("type") == "integer" else limits.prompts}
    for field in fields.keys() & {*PROMPTS, "stop"}:
        for node in _nodes(fields[field], "string"):
            node["minLength"] = 1
    if "n" in fields:
        fields["n"]["maximum"] = limits.n
    if "model" in fields:
        fields["model"] = {"enum": [name, None], "description": fields["model"]["description"]}
    if "messages" in fields:
        fields["messages"]["items"] = MESSAGE
    if "echo" in fields:
        fields["max_tokens"]["minimum"] = 0
    fields |= {field: {"description": "changes nothing"} for field in cls.ignored}
    fields |= {
        field: {"enum": [*values, None], "description": "not offered; these values ask for nothing"}
        for field, values in cls.only.items()
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _nodes(schema: Any, kind: str) -> Iterator[Json]:
    """The parts of a schema that describe values of a JSON type."""
    if isinstance(schema, list):
        for part in schema:
            yield from _nodes(part, kind)
    elif isinstance(schema, dict):
        if schema.get("type") == kind:
            yield schema
        for part in schema.values():
            yield from _nodes(part, kind)


def answers(*media: str, codes: Sequence[int | str] = ()) -> dict[int | str, Json]:
    """`responses` of a route: answers of these media types, and errors at these codes."""
    content = {kind: {"schema": {"type": "object"}} if kind == "application/json" else {} for kind in media}
    found: dict[int | str, Json] = {200: {"description": "the answer", "content": content}}
    error = {"application/json": {"schema": ERROR}}
    return found | {code: {"description": ApiError.__doc__.splitlines()[0], "content": error} for code in codes}
