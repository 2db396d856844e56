"""`isomodel generate`: prompts in, completions out."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from isomodel import fetch, program_cache, weights
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout.engine import Engine, PromptsRefused
from isomodel.rollout.engine_config import EngineConfig, device_sizes
from isomodel.rollout.jsonl import (
    PromptFileError,
    PromptLine,
    new_text_file,
    read_prompts,
    shortened,
    token_ids,
    write_lines,
)
from isomodel.rollout.outputs import Completion
from isomodel.rollout.pages import KV_BLOCK
from isomodel.rollout.sampling_params import SamplingParams
from isomodel.tokenizer import Tokenizer, TokenizerError
from pallas_kernels import environment

FEWEST_SEQS = 16
"""Fewer rows than this take as long on every backend."""


def add_commands(subparsers) -> None:
    """Adds `generate` to the command line; it sets `run(args) -> exit code`."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts, with the log-probability of every token",
        description="Completes one prompt or a JSONL file of them. Prompts go through the model's chat template. Each "
        "line of the output has the text, token ids, log-probabilities, weight versions, seed and finish reason.",
        epilog='A line of the input: {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]} or '
        '{"prompt_ids": [...]}, and, if you like, "id" (copied to the output) and "sampling" ({"temperature": 0.7, ...} '
        "for this line).",
    )
    parser.add_argument("model", help="a folder, a name that `isomodel fetch` knows, or a Hugging Face id")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument("--input", metavar="FILE.jsonl", help="a file of prompts")
    parser.add_argument(
        "--output", metavar="OUT.jsonl", help="file to write; - is standard output; default: the text alone is printed"
    )
    parser.add_argument("--raw", action="store_true", help="complete the prompt as it stands, without chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before each --prompt or `prompt`")
    parser.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the chat template (VALUE: JSON or text)",
    )
    _add_sampling(parser.add_argument_group("sampling"))
    add_engine_options(parser, most_tokens="what the prompts need")
    parser.set_defaults(run=run)


def _add_sampling(group) -> None:
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    group.add_argument("--min-p", type=float, default=0.0, help="0 is off (default)")
    group.add_argument("--seed", type=int, help="fixes the tokens; default: one is assigned and reported")
    group.add_argument("--max-tokens", type=int, default=256, help="most tokens of a completion (default 256)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends a completion")
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-sequence token")
    group.add_argument("-n", type=int, default=1, help="completions of each prompt (default 1)")
    group.add_argument("--prompt-logprobs", action="store_true", help="log-probabilities of the prompt's tokens too")


def add_engine_options(parser: argparse.ArgumentParser, *, most_tokens: str) -> None:
    """Adds the options that size an engine and choose its numerics; `most_tokens`: what max-model-len is by default."""
    group = parser.add_argument_group("engine (none of these reaches the bits, but numerics, backend and dtype)")
    group.add_argument("--numerics", choices=environment.MODES, default="iso", help="iso keeps bits (default)")
    group.add_argument("--backend", choices=("auto", "reference", "hopper"), default="auto")
    group.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and activations"
    )
    group.add_argument("--max-seqs", type=int, default=64, help="completions that run at one time (default 64)")
    group.add_argument("--max-model-len", type=int, help=f"most tokens, prompt included; default: {most_tokens}")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-memory-mb", type=float, help="size of the KV cache; default: what fits max-seqs, at most 1 GiB"
    )
    size.add_argument(
        "--memory-fraction",
        type=float,
        metavar="SHARE",
        help="in place of that: the KV cache takes what weights and scratch leave of this share of the device memory that JAX may take",
    )
    group.add_argument("--no-prefix-cache", action="store_true")


def kv_size(args: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's fields that size the KV cache, from the options of `add_engine_options`."""
    memory = None if args.kv_memory_mb is None else int(args.kv_memory_mb * 2**20)
    return {"kv_memory": memory, "memory_fraction": args.memory_fraction}


def run(args: argparse.Namespace) -> int:
    """Generates; returns exit code 0.

    Raises:
      PromptFileError: bad lines or prompts, all named.
      ValueError, OSError, FetchError, Unsupported, EnvironmentFault: of other faults. Nothing was written then.
    """
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        n=args.n,
        prompt_logprobs=args.prompt_logprobs,
    )
    template_args = _template_args(args)
    if args.input is not None:
        lines = read_prompts(args.input, sampling)
    else:
        lines = [PromptLine(i, "prompt", text, sampling) for i, text in enumerate(args.prompt, 1)]
    with contextlib.ExitStack() as stack:
        to_file = args.output not in (None, "-")
        out = stack.enter_context(new_text_file(args.output)) if to_file else sys.stdout  # fails before the model loads
        completions = _complete(args, lines, template_args)
        if args.output is None and args.input is None:
            _print_texts(lines, completions)
        else:
            write_lines(out, (_line(line, c) for line, c in _by_line(lines, completions)))
    return 0


def _complete(args: argparse.Namespace, lines: list[PromptLine], template_args: dict[str, Any]) -> list[Completion]:
    environment.use(args.numerics)
    program_cache.keep()
    numerics = Numerics(args.numerics, args.backend, args.dtype)
    numerics.impl  # noqa: B018  (refuses a backend that cannot serve before anything is loaded)
    folder = fetch.resolve(args.model)
    cfg = ModelConfig.load(folder)
    tokenizer = Tokenizer(folder)
    prompts = _encode(args, lines, tokenizer, template_args)
    config = _engine_config(args, cfg, lines, prompts)
    params = weights.load(folder, cfg, args.dtype)
    engine = Engine(cfg, params, numerics, config, tokenizer=tokenizer, warmup=False)
    sampling = [line.sampling for line in lines]
    try:
        engine.validate(prompts, sampling)
    except PromptsRefused as e:
        faults = [f"{_where(args)} {lines[i].number}: {fault}" for i, fault in e.faults.items()]
        raise PromptFileError(args.input or "--prompt", shortened(faults)) from e
    engine.warmup()
    return engine.generate(prompts, sampling, progress=True)


def _encode(args, lines: list[PromptLine], tokenizer: Tokenizer, template_args: dict[str, Any]) -> list[list[int]]:
    """Token ids of every line.

    Raises:
      PromptFileError: naming every line that the chat template refuses.
    """
    if not args.raw and not tokenizer.has_chat_template and any(line.kind == "prompt" for line in lines):
        raise TokenizerError(f"{args.model} has no chat template; use --raw to complete prompts as they stand")
    prompts, faults = [], []
    for line in lines:
        try:
            given = dict(raw=args.raw, system=args.system, template_args=template_args)
            prompts.append(token_ids(line, tokenizer, **given))
        except TokenizerError as e:
            faults.append(f"{_where(args)} {line.number}: {e}")
    if faults:
        raise PromptFileError(args.input or "--prompt", shortened(faults))
    return prompts


def _where(args) -> str:
    return "line" if args.input is not None else "prompt"


def _template_args(args: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for text in args.template_arg:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--template-arg {text!r} must be KEY=VALUE")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    if args.raw and (values or args.system is not None):
        raise ValueError("--system and --template-arg speak to the chat template, and --raw switches it off")
    return values


def _engine_config(args, cfg: ModelConfig, lines: list[PromptLine], prompts: list[list[int]]) -> EngineConfig:
    """Sizes no larger than this work needs: smaller programs compile and start faster."""
    most = max(len(p) + (line.sampling.max_tokens or cfg.max_positions) for line, p in zip(lines, prompts, strict=True))
    whole_blocks = -(-most // KV_BLOCK) * KV_BLOCK
    samples = sum(line.sampling.n for line in lines)
    rows = -(-sum(map(len, prompts)) // KV_BLOCK) * KV_BLOCK
    return EngineConfig(
        max_seqs=min(args.max_seqs, max(FEWEST_SEQS, samples)),
        max_model_len=args.max_model_len or max(2, min(cfg.max_positions, whole_blocks)),
        **kv_size(args),
        chunk_tokens=max(1, min(device_sizes()["chunk_tokens"], rows)),
        prefix_cache=not args.no_prefix_cache,
        prompt_logprobs=any(line.sampling.prompt_logprobs for line in lines),
    )


def _by_line(lines: list[PromptLine], completions: list[Completion]):
    """(line, completion) pairs: completions stand in the lines' order, the n of each together."""
    following = iter(completions)
    return [(line, next(following)) for line in lines for _ in range(line.sampling.n)]


def _line(line: PromptLine, completion: Completion) -> dict[str, Any]:
    """One line of the output: which prompt, what came of it."""
    prompt = {} if line.kind == "prompt_ids" else {line.kind: line.value}
    values = {name: value for name, value in completion.to_json().items() if name != "request_id"}
    return {"line": line.number, **({} if line.id is None else {"id": line.id}), **prompt, **values}


def _print_texts(lines: list[PromptLine], completions: list[Completion]) -> None:
    for line, completion in _by_line(lines, completions):
        if len(completions) > 1:
            print(f"--- prompt {line.number}, completion {completion.index + 1}")
        print(completion.text)
