"""Tokenizer: text to token ids and back, and the chat template, of a Hugging Face folder."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, and whatever else the template reads."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or a chat that its template does not take."""


class Tokenizer:
    """Wraps the fast tokenizer in a folder's tokenizer.json.

    What tokenizer.json says is what runs: it is loaded as it stands, not through the class that tokenizer_config.json
    names, whose constructor in transformers 5 replaces the file's splitting of digits (measured with GPT2Tokenizer).
    transformers is imported at the first use only: that takes seconds.
    """

    def __init__(self, folder: str | Path):
        """Loads the tokenizer of a folder.

        Raises:
          TokenizerError: there is none, or its files are damaged.
        """
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise TokenizerError(
                f"{self.folder} has no tokenizer.json; only fast tokenizers are supported: save one there with "
                "transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)`"
            )
        try:
            self.hf = _load_fast(str(self.folder))
        except Exception as e:  # the tokenizers library raises bare Exception
            raise TokenizerError(f"{self.folder}: the tokenizer cannot be read: {e}") from e

    def __len__(self) -> int:
        """Number of ids, added tokens included. A model's vocabulary may be padded beyond it, never be smaller."""
        return len(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.hf.pad_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: `decode` leaves them out unless told otherwise."""
        return frozenset(self.hf.all_special_ids) | {
            i for i, token in self.hf.added_tokens_decoder.items() if token.special
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        Args:
          add_special_tokens: let the tokenizer add what it adds by itself (a bos, for some models). False for text that
            already carries them, such as a rendered chat.
        """
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, exactly the bytes they stand for; bytes that are no whole character become U+FFFD."""
        return self.hf.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def template_reads(self, name: str) -> bool:
        """Whether the chat template mentions a name that a caller may set: what transformers takes itself is none."""
        if name in inspect.signature(self.hf.apply_chat_template).parameters or name == "messages":
            return False
        return re.search(rf"\b{re.escape(name)}\b", str(self.hf.chat_template)) is not None

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """The text that the folder's chat template makes of a conversation.

        Args:
          messages: oldest first.
          add_generation_prompt: end with the opening of the assistant's turn.
          **template_args: passed to the template (`enable_thinking=False`, `tools=[...]`, ...).

        Raises:
          TokenizerError: the folder has no template, a message has no role or content, or the template refuses them.
        """
        if not self.has_chat_template:
            raise TokenizerError(f"{self.folder} has no chat template; give plain prompts, or add chat_template.jinja")
        faults = [f"message {i} {fault}" for i, m in enumerate(messages) if (fault := _message_fault(m))]
        if faults or not messages:
            raise TokenizerError("this is not a chat: " + ("; ".join(faults) or "there are no messages"))
        try:
            return self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            )
        except ImportError:
            raise
        except Exception as e:  # jinja2's, and whatever a template raises
            raise TokenizerError(f"the chat template of {self.folder.name} refuses these messages: {e}") from e

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **template_args: Any
    ) -> list[int]:
        """Token ids of a conversation: `render_chat`, then `encode` without adding anything."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template_args)
        return self.encode(text, add_special_tokens=False)


def _message_fault(message: Any) -> str | None:
    """Templates write nothing, or "None", for what is missing; so it is looked for here."""
    if not isinstance(message, Mapping):
        return f"is {message!r}, not an object with role and content"
    if not message.get("role"):
        return "has no role"
    if message.get("content") is None and not message.get("tool_calls"):
        return "has neither content nor tool_calls"
    return None


def _load_fast(folder: str):
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch, which we do not need
    import transformers  # slow to import, and not needed for token ids alone

    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
