"""The requests as pydantic models: what each takes, and every fault of a body in one message."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import ConfigDict, FailFast, Field

from isomodel.rollout.sampling_params import MIN_TEMPERATURE, SamplingParams
from isomodel.rollout.server.errors import ApiError
from isomodel.yaml_config import nearest


class _AtFirst(FailFast):
    """One fault of a list is enough: a body can hold a million. Unlike its base, it may stand in a union."""

    def __hash__(self):
        return hash(_AtFirst)


Ids = Annotated[list[int], _AtFirst()]
Texts = Annotated[list[str], _AtFirst()]
Lists = Annotated[list[Ids], _AtFirst()]

MAX_EXACT = 2**53
"""Beyond it a float does not say which integer was meant."""
ONLY = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
"""Parameters of OpenAI's that are not built here: accepted with the values that ask for nothing, else refused by name."""


class Strict(pydantic.BaseModel):
    """A JSON object whose fields are all known and of their types; null stands for the default. A field's description
    says what it must be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ignored: ClassVar[tuple[str, ...]] = ()
    """Known fields that change nothing."""
    only: ClassVar[dict[str, tuple]] = {}
    """Known fields that are not built, with the values that ask for nothing."""
    verbatim: ClassVar[tuple[str, ...]] = ()
    """Fields whose numbers stay as they are written; in others 1.0 is the integer 1, as in JSON."""

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """The request that a body holds.

        Raises:
          ApiError: 400, naming every fault.
        """
        try:
            data = json.loads(raw, parse_constant=_no_constant)
            if b"\\u" in raw:  # half a surrogate pair is no text, and no tokenizer takes it
                json.dumps(data, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as e:
            raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from e
        if not isinstance(data, dict):
            raise ApiError(400, f"the body must be a JSON object, not {type(data).__name__}", code="invalid_json")
        data = {name: value for name, value in data.items() if value is not None and name not in cls.ignored}
        data = {name: value if name in cls.verbatim else _whole(value) for name, value in data.items()}
        faults = {}
        for name in [name for name in data if name in cls.only]:
            if (value := data.pop(name)) not in cls.only[name]:
                faults[name] = f"{name}={value!r} is not offered here; leave it out"
        try:
            body = cls.model_validate(data)
        except pydantic.ValidationError as e:
            faults |= cls._faults(e)
        if faults:
            raise ApiError(400, "; ".join(faults.values()), param=next(iter(faults)))
        return body

    @classmethod
    def _faults(cls, error: pydantic.ValidationError) -> dict[str, str]:
        """{field: what is wrong}; a union gives one error for each of its members, and one message."""
        faults: dict[str, str] = {}
        for e in error.errors(include_url=False, include_context=False):
            name = str(e["loc"][0])[:80]
            if name in faults:
                continue
            if e["type"] == "extra_forbidden":
                faults[name] = f"{name} is unknown; {nearest(name, cls.model_fields)}"
            elif e["type"] == "missing":
                faults[name] = f"{name} is missing: it is {cls.model_fields[name].description}"
            else:
                faults[name] = f"{name} must be {cls.model_fields[name].description}"
        return faults


class Body(Strict):
    """What all requests share."""

    model: str | None = Field(None, description="the name of the served model")
    n: int = Field(1, description="an integer: samples of each prompt")
    temperature: float = Field(1.0, description=f"0 (greedy), or a number of at least {MIN_TEMPERATURE}")
    top_p: float = Field(1.0, description="a number above 0 and at most 1; 1 is off")
    top_k: int = Field(0, description="an integer >= 0; 0 is off")
    min_p: float = Field(0.0, description="a number from 0 to 1; 0 is off")
    seed: int | None = Field(None, description="an integer from 0 to 2**64 - 1; one is assigned and reported otherwise")
    max_tokens: int | None = Field(None, description="an integer >= 1")
    stop: str | Texts = Field([], description="a text or a list of texts that end a completion")
    stop_token_ids: Ids = Field([], description="a list of token ids that end a completion")
    ignore_eos: bool = Field(False, description="true or false: go on after the model's end of sequence")

    def sampling(self, **changes: Any) -> SamplingParams:
        """How to sample.

        Raises:
          ApiError: 400, naming every field that is out of range.
        """
        values = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }
        try:
            return SamplingParams(**values | changes)
        except ValueError as e:
            raise ApiError(400, str(e)) from e


class TextBody(Body):
    """What the two text endpoints share."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "metadata", "store")
    only: ClassVar[dict[str, tuple]] = ONLY

    stream: bool = Field(False, description="true or false: send server-sent events")
    stream_options: dict[str, bool] = Field({}, description="an object with include_usage, true or false")
    return_token_ids: bool = Field(False, description="true or false: token ids of prompt and completion too")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options.get("include_usage", False)

    @pydantic.field_validator("stream_options")
    @classmethod
    def _options(cls, options: dict[str, bool]) -> dict[str, bool]:
        if options.keys() - {"include_usage"}:
            raise ValueError("only include_usage")
        return options


class CompletionBody(TextBody):
    """Of /v1/completions."""

    prompt: str | Ids | Texts | Lists = Field(
        description="a text, a list of texts, a list of token ids, or a list of lists of token ids"
    )
    max_tokens: int | None = Field(16, description="an integer >= 1; with echo also 0: nothing is sampled")
    logprobs: int | None = Field(
        None, description="an integer >= 0: the sampled tokens' log-probabilities, and so many of the likeliest"
    )
    echo: bool = Field(False, description="true or false: the prompt before the completion; not in streams")

    @property
    def only_echo(self) -> bool:
        """Whether nothing of a completion is asked for."""
        return self.echo and self.max_tokens == 0

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Self:
        if self.echo and self.stream:
            raise ApiError(400, "echo is of whole answers; leave out stream, or echo", param="echo")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(TextBody):
    """Of /v1/chat/completions."""

    verbatim: ClassVar[tuple[str, ...]] = ("messages", "chat_template_kwargs")

    messages: list[dict[str, Any]] = Field(description="a list of messages, objects with role and content")
    max_completion_tokens: int | None = Field(None, description="an integer >= 1; another name of max_tokens")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="an object of what the model's chat template reads, such as enable_thinking"
    )
    logprobs: bool = Field(False, description="true or false: log-probabilities of the sampled tokens")
    top_logprobs: int = Field(0, description="an integer >= 0: with logprobs, so many of the likeliest tokens too")

    @pydantic.model_validator(mode="after")
    def _together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def chat(self) -> list[dict[str, Any]]:
        """The messages with contents as texts; a content of several text parts is their texts, joined.

        Raises:
          ApiError: 400, where a part is no text.
        """
        return [{**message, **_content(i, message)} for i, message in enumerate(self.messages)]


class RolloutBody(Body):
    """Of /v1/rollout."""

    prompt_ids: Ids | Lists = Field(description="a list of token ids, or a list of such lists")
    prompt_logprobs: bool = Field(False, description="true or false: log-probabilities of the prompts' tokens too")
    top_logprobs: int = Field(0, description="an integer >= 0: so many of the likeliest tokens at each sampled one")

    def prompts(self) -> list[list[int]]:
        """One entry a prompt."""
        return [self.prompt_ids] if not self.prompt_ids or isinstance(self.prompt_ids[0], int) else self.prompt_ids


def _content(i: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ApiError(400, f"message {i}: content must be a text or a list of text parts", param="messages")
        return {}
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
        raise ApiError(400, f"message {i}: only parts of type text are served", param="messages")
    return {"content": "".join(part["text"] for part in content)}


def _whole(value: Any, depth: int = 2) -> Any:
    """The value with integers where floats are whole, in lists of lists too."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return int(value)
    if depth and isinstance(value, list) and any(isinstance(x, float | list) for x in value):
        return [_whole(x, depth - 1) for x in value]
    return value


def _no_constant(name: str):
    raise ValueError(f"{name} is no JSON number")
