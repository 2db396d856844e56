"""Makes configs/demo_tokenizer: one token a character, for the tasks of trainer/tasks.py. Run: python scripts/make_demo_tokenizer.py

Its vocabulary is the digits and the tasks' marks, so that a model with random weights finds rewards by chance.
"""

from __future__ import annotations

import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+=><#"
FOLDER = pathlib.Path(__file__).parent.parent / "configs" / "demo_tokenizer"


def make(folder: pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNKNOWN)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
