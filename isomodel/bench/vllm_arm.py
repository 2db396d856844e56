"""The arm of a benchmark that is stock vLLM, offline: CUDA graphs on, prefix caching on, its own defaults otherwise."""

from __future__ import annotations

import time
from typing import Any

from isomodel.bench.work import Work


def run(folder: str, random_weights: bool, work: Work, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    """Measures the work on vLLM.LLM; arguments and result as `iso_arm.run`, `options` are vLLM's own.

    Raises:
      ImportError: vLLM is not installed.
      RuntimeError: a completion has fewer tokens than were asked for.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    start = time.perf_counter()
    settings = dict(
        load_format="dummy" if random_weights else "auto",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=work.length,
        max_num_seqs=work.sequences,
        gpu_memory_utilization=0.6,
        seed=0,
    )
    llm = LLM(folder, **settings | options)
    started = time.perf_counter() - start
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    common = dict(temperature=work.temperature, ignore_eos=True, detokenize=False)
    sampling = SamplingParams(
        n=work.samples, max_tokens=work.max_tokens, logprobs=0 if work.logprobs else None, **common
    )

    def timed(prompts: list[list[int]], sampling: SamplingParams) -> float:
        start = time.perf_counter()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        short = [s for o in outputs for s in o.outputs if len(s.token_ids) != sampling.max_tokens]
        if short:
            raise RuntimeError(f"{len(short)} completions ended early: {short[0].finish_reason}")
        return seconds

    seconds, first = [], []
    for repeat in range(repeats + 1):
        seconds.append(timed(work.token_ids(vocab_size, repeat), sampling))
        one = work.token_ids(vocab_size, repeats + 1 + repeat)[:1]
        first.append(timed(one, SamplingParams(max_tokens=1, **common)))
    return {
        "tokens": work.sequences * work.max_tokens,
        "seconds": seconds[1:],
        "ttft_s": first[1:],
        "start_s": started,
    }
