"""The arm of a benchmark that is stock vLLM, offline: CUDA graphs on, prefix caching on, its own defaults otherwise."""

from __future__ import annotations

import time
from typing import Any

from isomodel.bench.work import Work


def run(
    folder: str, random_weights: bool, works: list[Work], repeats: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measures each work on one vllm.LLM that has room for all; arguments and result as `iso_arm.run`, `options` are vLLM's.

    Raises:
      ImportError: vLLM is not installed.
      RuntimeError: a completion has fewer tokens than were asked for.
    """
    from vllm import LLM

    start = time.perf_counter()
    settings = dict(
        load_format="dummy" if random_weights else "auto",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(work.length for work in works),
        max_num_seqs=max(work.sequences for work in works),
        gpu_memory_utilization=0.6,
        seed=0,
    )
    llm = LLM(folder, **settings | options)
    started = time.perf_counter() - start
    return [_measure(llm, work, repeats) | {"start_s": started} for work in works]


def _measure(llm, work: Work, repeats: int) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    common = dict(temperature=work.temperature, detokenize=False)
    sampling = SamplingParams(
        n=work.samples,
        max_tokens=work.max_tokens,
        logprobs=0 if work.logprobs else None,
        ignore_eos=work.file is None,
        **common,
    )

    def timed(prompts: list[list[int]], sampling: SamplingParams) -> tuple[int, float]:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = [s for o in outputs for s in o.outputs]
        short = [s for s in samples if len(s.token_ids) != sampling.max_tokens]
        if short and sampling.ignore_eos:
            raise RuntimeError(f"{len(short)} completions ended early: {short[0].finish_reason}")
        return sum(len(s.token_ids) for s in samples), seconds

    tokens, seconds, first = [], [], []
    for repeat in range(repeats + 1):
        sampled, elapsed = timed(work.token_ids(vocab_size, repeat), sampling)
        tokens.append(sampled)
        seconds.append(elapsed)
        one = work.token_ids(vocab_size, repeats + 1 + repeat)[:1]
        first.append(timed(one, SamplingParams(max_tokens=1, ignore_eos=True, **common))[1])
    return {"tokens": tokens[1:], "seconds": seconds[1:], "ttft_s": first[1:]}
