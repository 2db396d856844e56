"""The answers as JSON values, in the shapes of OpenAI's API: whole completions, and pieces of streamed ones."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from isomodel.rollout.detokenizer import REPLACEMENT
from isomodel.rollout.outputs import Completion, Tail
from isomodel.rollout.server.text_stream import TextStream
from isomodel.tokenizer import Tokenizer

Json = dict[str, Any]
Top = list[tuple[int, float]]
"""The likeliest tokens at one place and their log-probabilities."""


class TextAnswer:
    """One answer of /v1/completions; ChatAnswer says what is otherwise for chats.

    Choice p * n + k is sample k of prompt p. Beyond OpenAI's fields, a choice that has ended says its seed and what
    stopped it, and token ids where they are asked for.
    """

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, model: str, fingerprint: str, *, logprobs: bool, token_ids: bool):
        self.tokenizer, self.with_logprobs, self.with_ids = tokenizer, logprobs, token_ids
        self._about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(
        self, prompts: Sequence[Sequence[int]], completions: list[list[Completion]], *, echo: bool = False
    ) -> Json:
        """The answer that is not streamed; with `echo` each prompt stands before its completions."""
        choices = [
            Choice(self, p * len(group) + k).whole(completion, echo=echo)
            for p, group in enumerate(completions)
            for k, completion in enumerate(group)
        ]
        tokens = sum(completion.token_ids.size for group in completions for completion in group)
        return {"object": self.object, **self._about, "choices": choices, "usage": usage(prompts, tokens)}

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """One event of a stream."""
        return {"object": self.chunk_object, **self._about, "choices": choices, **more}

    def opening(self) -> Json | None:
        """Text fields of a choice's first chunk, before there is a token; None: it has none."""
        return None

    def message(self, text: str) -> Json:
        """Text fields of a whole choice."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """Text fields of a piece."""
        return {"text": text}

    def logprobs(
        self, ids: Sequence[int], values: Sequence[float | None], offsets: Sequence[int], top: Sequence[Top] | None = None
    ) -> Json:
        """Log-probabilities of tokens, the float32's own values; where each token's text begins.

        `top`: the likeliest tokens at each, which are spelled: of those that look alike the likeliest counts.
        """
        tokens = [self.spelled(i) for i in ids]
        alternatives = None
        if top is not None:
            alternatives = [dict(reversed(self._named(found))) for found in top]
            for found, token, value in zip(alternatives, tokens, values, strict=True):
                found.setdefault(token, value)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": alternatives, "text_offset": offsets}

    def _named(self, top: Top) -> list[tuple[str, float]]:
        return [(self.spelled(i), value) for i, value in top]

    def spelled(self, token: int) -> str:
        """A token's own text."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


class ChatAnswer(TextAnswer):
    """One answer of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def logprobs(
        self, ids: Sequence[int], values: Sequence[float | None], offsets: Sequence[int], top: Sequence[Top] | None = None
    ) -> Json:
        def said(token: str, value: float | None) -> Json:
            whole = REPLACEMENT not in token  # else its bytes are a part of a character, which its text does not tell
            return {"token": token, "logprob": value, "bytes": list(token.encode()) if whole else None}

        found = [[]] * len(ids) if top is None else [[said(*pair) for pair in self._named(pairs)] for pairs in top]
        content = [
            {**said(self.spelled(i), value), "top_logprobs": alternatives}
            for i, value, alternatives in zip(ids, values, found, strict=True)
        ]
        return {"content": content, "refusal": None}


class Choice:
    """One sample's choice in an answer, whole or piece by piece."""

    def __init__(self, answer: TextAnswer, index: int, stops: Sequence[str] = ()):
        """`stops`: of the request; only pieces need them."""
        self._answer, self._index = answer, index
        self._text = TextStream(stops, answer.tokenizer.decode)
        self._seen = 0

    def opening(self) -> Json | None:
        """Choice of the first chunk, before there is a token; None: there is none."""
        fields = self._answer.opening()
        return fields and {"index": self._index, **fields, "logprobs": None, "finish_reason": None}

    def whole(self, completion: Completion, *, echo: bool = False) -> Json:
        """The choice that is not streamed; with `echo` text and log-probabilities begin with the prompt's."""
        answer, text, before = self._answer, completion.text, None
        if echo:
            ids = completion.prompt_ids.tolist()
            text = answer.tokenizer.decode(ids) + text
            if answer.with_logprobs:
                values = [None, *completion.prompt_logprobs[1:].tolist()]
                before = answer.logprobs(ids, values, [self._text.push(token) for token in ids])
        choice = self._choice(completion, answer.message(text), stream=False)
        if before:
            after = choice["logprobs"]
            if after["top_logprobs"] is not None:
                before["top_logprobs"] = [None] * len(ids)
            choice["logprobs"] = {name: before[name] and before[name] + after[name] for name in before}
        return choice

    def piece(self, new: Tail | Completion) -> Json | None:
        """Choice of a chunk for what is new of the sample; None while there is nothing to say."""
        ended = isinstance(new, Completion)
        choice = self._choice(new, None, stream=True)
        text = self._text.finish(new.text) if ended else self._text.take()
        if not (text or ended or self._answer.with_logprobs or self._answer.with_ids):
            return None
        return choice | self._answer.delta(text)

    def _choice(self, new: Tail | Completion, fields: Json | None, *, stream: bool) -> Json:
        answer, ended = self._answer, isinstance(new, Completion)
        skip = self._seen if ended else 0  # a Completion has all tokens, a Tail only new ones
        ids = new.token_ids[skip:].tolist()
        self._seen += len(ids)
        choice: Json = {"index": self._index, **(fields or {}), "logprobs": None, "finish_reason": None}
        offsets = [self._text.push(token) for token in ids] if answer.with_logprobs or (stream and not ended) else []
        if answer.with_logprobs:
            choice["logprobs"] = answer.logprobs(ids, new.logprobs[skip:].tolist(), offsets, _pairs(new, skip))
        if answer.with_ids:
            choice |= {"token_ids": ids, "versions": new.versions[skip:].tolist()}
        if ended:
            choice |= {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason, "seed": new.seed}
            if answer.with_ids:
                choice["prompt_token_ids"] = new.prompt_ids.tolist()
        return choice


def _pairs(new: Tail | Completion, skip: int) -> list[Top] | None:
    """The likeliest tokens at each new one; None where they were not asked for."""
    if new.top_ids is None:
        return None
    rows = zip(new.top_ids[skip:].tolist(), new.top_logprobs[skip:].tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def nothing_of(completion: Completion) -> Completion:
    """The completion without its tokens: what is left is what it says of the prompt."""
    none = {name: getattr(completion, name)[:0] for name in ("token_ids", "versions")}
    for name in ("logprobs", "top_ids", "top_logprobs"):
        if (values := getattr(completion, name)) is not None:
            none[name] = values[:0]
    return dataclasses.replace(completion, **none, text="", finish_reason="length", stop_reason=None)


def usage(prompts: Sequence[Sequence[int]], completion_tokens: int) -> Json:
    """Counts of tokens."""
    prompt_tokens = sum(map(len, prompts))
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def rollout(completions: list[list[Completion]], model: str, fingerprint: str) -> Json:
    """The answer of /v1/rollout: tokens and log-probabilities of all samples, each float as exact as it was."""
    samples = []
    for p, group in enumerate(completions):
        for completion in group:
            values = completion.to_json()
            for name in ("request_id", "text", "prompt_ids"):
                del values[name]
            samples.append({"prompt": p, **values})
    return {"object": "rollout", "model": model, "system_fingerprint": fingerprint, "samples": samples}
