"""The tokenizer wrapper, and that SmolLM2's tokenizer, rebuilt from GGUF, is the published one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from isomodel import gguf_tokenizer
from isomodel.tokenizer import Tokenizer, TokenizerError
from tests.data import golden
from tests.isomodel import gguf_maker, smollm2

# Ids that the published tokenizer of SmolLM2 gives, as other projects' tests record them.
PUBLISHED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face": [
        *(2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182)
    ],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    *("<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>"),
    *("<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"),
]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
# The published vocabulary has no tokens for the bytes of these: five control characters, and planes 4 to 11 of Unicode,
# in which no character is assigned.
NO_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}


def encodable(text: str) -> bool:
    return all(ord(c) not in NO_BYTES and not 0x40000 <= ord(c) <= 0xBFFFF for c in text)


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return Tokenizer(smollm2.folder())


def made(folder, pre: str = "smollm", **changes) -> Tokenizer:
    """A small tokenizer in `folder`."""
    meta = gguf_maker.tokenizer_meta(pre) | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    meta = {key: value for key, value in (meta | changes).items() if value is not None}
    gguf_tokenizer.write(folder, gguf_tokenizer.build(meta, "test"), meta, 128)
    return Tokenizer(folder)


# SmolLM2


def test_published_ids(smol):
    assert {text: smol.encode(text) for text in PUBLISHED} == PUBLISHED


def test_sizes_and_special_tokens(smol):
    assert len(smol) == 49152 and (smol.eos_token_id, smol.pad_token_id) == (2, 2)
    assert smol.special_ids == frozenset(range(17))
    assert [smol.encode(token) for token in SPECIAL] == [[i] for i in range(17)]
    assert smol.encode("a<|im_end|>b") == [*smol.encode("a"), 2, *smol.encode("b")]
    assert smol.decode([1, 19556, 2]) == "Hello"
    assert smol.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


@pytest.mark.parametrize("text", ["1234567890", "3.14159", "x2y34", "٣٤५６", "½²Ⅷ", "-12,345.60"])
def test_every_digit_is_a_token_of_its_own(smol, text):
    ids = smol.encode(text)
    assert smol.decode(ids) == text
    for i in ids:
        assert sum(c.isnumeric() for c in smol.decode([i])) <= 1
    pieces = smol.hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert all(end - start == 1 for _, (start, end) in pieces if any(c.isnumeric() for c in text[start:end]))


@given(st.text().filter(encodable))
def test_every_text_survives(smol, text):
    ids = smol.encode(text)
    assert smol.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < 49152 for i in ids)


AWKWARD = ["don't I'LL we've", "  \t\n\r\n x  ", "👩‍👩‍👧‍👦🇨🇭", "e\u0301 é \u200d\ufeff", "<|im_end", "\x00\x7f", "\ud7ff"]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_survive(smol, text):
    assert smol.decode(smol.encode(text), skip_special_tokens=False) == text


def test_what_the_vocabulary_lacks_is_what_we_say(smol):
    lost = {c for c in range(0x80) if smol.decode(smol.encode(chr(c))) != chr(c)}
    assert lost == NO_BYTES
    edges = [0x3FFFF, 0x40000, 0xBFFFF, 0xC0000, 0x10FFFF]
    assert [c for c in edges if smol.decode(smol.encode(chr(c))) != chr(c)] == [0x40000, 0xBFFFF]


def test_chat_template(smol):
    user = {"role": "user", "content": "Hi <there>"}
    turn = "<|im_start|>user\nHi <there><|im_end|>\n"
    assert smol.render_chat([user]) == SYSTEM + turn + "<|im_start|>assistant\n"
    assert smol.render_chat([user], add_generation_prompt=False) == SYSTEM + turn
    own = [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "Hello"}, user]
    assert smol.render_chat(own) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + turn + "<|im_start|>assistant\nHello<|im_end|>\n" + turn
    ) + "<|im_start|>assistant\n"
    ids = smol.apply_chat_template([user])
    assert ids == smol.encode(smol.render_chat([user])) and ids[:3] == [1, 9690, 198]
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_chats_are_what_transformers_made_of_them(smol):
    """Golden: rendered and encoded by transformers' AutoTokenizer in another environment."""
    chats = golden.smollm2_chats()
    assert len(chats) == 8
    for chat in chats:
        assert smol.render_chat(chat["messages"]) == chat["rendered"]
        assert smol.apply_chat_template(chat["messages"]) == chat["prompt"]
        assert smol.decode(chat["greedy"], skip_special_tokens=False) == chat["text"]
    assert any(chat["messages"][0]["role"] == "system" for chat in chats)


# The wrapper


def test_tokenizer_json_is_what_runs(tmp_path):
    """Whatever class tokenizer_config.json names: transformers' own GPT2Tokenizer drops the splitting of digits."""
    right = made(tmp_path).encode("123")
    assert len(right) == 3
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    assert Tokenizer(tmp_path).encode("123") == right
    import transformers

    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path).encode("123")) == 1  # the fault that this avoids


def test_bos_is_added_on_request_only(tmp_path):
    tokenizer = made(tmp_path, "llama-bpe")
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert len(hello) == 1 and tokenizer.encode("hello") == [1, *hello]
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = made(tmp_path, "llama-bpe", **{"tokenizer.chat_template": template})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [1, *hello]  # not twice


def test_template_arguments(tmp_path):
    template = "{% if think is defined and think %}T{% endif %}{{ tools | length if tools else 0 }}"
    tokenizer = made(tmp_path, **{"tokenizer.chat_template": template})
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(chat) == "0"
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert tokenizer.render_chat(chat, think=True, tools=[tool]) == "T1"


def test_bytes_that_are_no_character_yet(tmp_path):
    tokenizer = made(tmp_path)
    ids = tokenizer.encode("猫")
    assert len(ids) == 3 and tokenizer.decode(ids) == "猫"
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_numpy_ids_decode(tmp_path):
    import numpy as np

    tokenizer = made(tmp_path)
    assert tokenizer.decode(np.array(tokenizer.encode("hello world"), np.int32)) == "hello world"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "there are no messages"),
        (["hello"], "message 0 is 'hello', not an object"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], "message 1 has no role"),
        ([{"role": "user"}, {"role": "user", "content": None}], "message 0 has neither .*; message 1 has neither"),
    ],
)
def test_bad_chats(tmp_path, messages, says):
    with pytest.raises(TokenizerError, match=says):
        made(tmp_path).render_chat(messages)


def test_a_message_may_be_calls_alone(tmp_path):
    tokenizer = made(tmp_path, **{"tokenizer.chat_template": "{{ messages[0].tool_calls | length }}"})
    assert tokenizer.render_chat([{"role": "assistant", "tool_calls": [{}]}]) == "1"


def test_a_template_that_raises(tmp_path):
    tokenizer = made(tmp_path, **{"tokenizer.chat_template": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(TokenizerError, match="refuses these messages: roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_no_template(tmp_path):
    tokenizer = made(tmp_path, **{"tokenizer.chat_template": None})
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_no_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match="has no tokenizer.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Unheard"}}'])
def test_damaged_tokenizer(tmp_path, content):
    made(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="the tokenizer cannot be read"):
        Tokenizer(tmp_path)


def test_importing_the_module_does_not_import_transformers():
    code = "import isomodel.tokenizer, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_library_is_the_one_that_the_rebuilt_file_was_made_with(tmp_path):
    """tokenizer.json read by the tokenizers library alone gives the wrapper's ids."""
    tokenizer = made(tmp_path)
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world 123", "the café\n\n", "<|im_start|>hello<tool>"):
        assert alone.encode(text).ids == tokenizer.encode(text)
