"""Loads a running server with many clients at once, and asks everything again, one at a time: the bits must be the same.

    isomodel serve MODEL &
    python -m benchmarks.serve_load --url http://127.0.0.1:8000 --clients 64 --requests 256

Requests differ in endpoint, lengths, sampling, samples a prompt, streamed or not; some share a beginning; some clients go
away midway. Token ids, log-probabilities (as float32 bits), texts and finish reasons are compared, of those that went away
what they had got. Exit code 1: a value differs, a request failed, or the server holds a page when it is idle. To force
preemptions give the server few pages (--kv-memory-mb).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import rich.console
import rich.table

from benchmarks import report
from benchmarks.live_server import Faulty, LiveServer

WORDS = "the of and 17 to in is that it was for 2026 on are as with they be at this from I have or by one had not but what \
Straße naïve 日本 😀 sum if x=3; ( ) . ,".split(" ")
TEXTS = 4
"""Beginnings that half of the prompts share."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request. `gone_after`: pieces of a stream (or hundredths of a second of an answer that is not one) after which
    the client goes away; None: it stays."""

    path: str
    body: dict[str, Any]
    gone_after: int | None = None


@dataclasses.dataclass
class Choice:
    """What came of one sample."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclasses.dataclass
class Answer:
    """What came of a request, by the sample's index.

    Attributes:
      first_s: seconds to the first token of a stream. fault: why there is no answer.
    """

    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    first_s: float | None = None
    fault: str | None = None
    gone: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


@dataclasses.dataclass(frozen=True)
class Load:
    """What a load showed.

    Attributes:
      requests, gone: asked, and of them left by their client. tokens: received under load.
      values: compared. different: of them, those whose bits are not the same alone; `where` names their requests.
      faults: requests without an answer. leak: what the server held when idle, or None.
      seconds: of the load. first_s: seconds to the first token, of each stream.
      preemptions, prefix_hits: of the server meanwhile. most_running: samples that ran side by side.
    """

    requests: int
    gone: int
    tokens: int
    values: int
    different: int
    where: list[int]
    faults: list[str]
    leak: str | None
    seconds: float
    first_s: list[float]
    preemptions: int
    prefix_hits: int
    most_running: int

    @property
    def passed(self) -> bool:
        return bool(self.values) and not (self.different or self.where or self.faults or self.leak)


def asks(server: LiveServer, count: int, *, longest: int, max_tokens: int, gone: float, seed: int) -> list[Ask]:
    """Random requests.

    Args:
      longest: characters of a prompt. max_tokens: of a sample. gone: share of the clients that go away.
      seed: the same gives the same requests.
    """
    rng = np.random.default_rng(seed)
    shared = [_text(rng, longest // 2) for _ in range(TEXTS)]
    _, probe = server.ask("/v1/completions", {"prompt": _text(rng, longest), "max_tokens": 1, "return_token_ids": True})
    ids = probe["choices"][0]["prompt_token_ids"]
    paths = ["/v1/completions", "/v1/rollout"]
    if server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})[0] == 200:
        paths.append("/v1/chat/completions")
    return [_ask(rng, rng.choice(paths), shared, ids, longest, max_tokens, gone) for _ in range(count)]


def _ask(rng, path: str, shared: list[str], ids: list[int], longest: int, max_tokens: int, gone: float) -> Ask:
    body = {"seed": int(rng.integers(2**53)), "max_tokens": _skewed(rng, max_tokens), "n": int(rng.choice([1, 1, 1, 2, 4]))}
    body["temperature"] = float(rng.choice([0, 0.5, 0.7, 1, 1.3]))
    body |= ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}, {"ignore_eos": True})[rng.integers(5)]
    begins = shared[rng.integers(TEXTS)] if rng.random() < 0.5 else ""
    text = begins + _text(rng, _skewed(rng, longest - len(begins)))
    if path == "/v1/rollout":
        at = 0 if begins else int(rng.integers(len(ids)))
        body["prompt_ids"] = ids[at : at + _skewed(rng, len(ids))]
    else:
        body |= {"stream": bool(rng.random() < 0.6), "return_token_ids": True}
        if path == "/v1/completions":
            body |= {"prompt": text, "logprobs": 0}
        else:
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": True}
    return Ask(path, body, int(rng.integers(8)) if rng.random() < gone else None)


def _skewed(rng, most: int) -> int:
    """1 to `most`, short ones as often as long ones."""
    return int(np.exp(rng.uniform(0, np.log(most + 1))))


def _text(rng, length: int) -> str:
    """Words, at most `length` bytes of UTF-8: no tokenizer makes more tokens of it."""
    text = " ".join(rng.choice(WORDS, length // 2 + 1))
    return text.encode()[:length].decode(errors="ignore") or "a"


def answer(server: LiveServer, ask: Ask) -> Answer:
    """Asks, and goes away when the request says so. A failure is a field of what it returns."""
    got, start = Answer(), time.perf_counter()
    try:
        with server.connection() as connection:
            connection.request("POST", ask.path, json.dumps(ask.body))
            if ask.gone_after is not None and not ask.body.get("stream"):
                time.sleep(ask.gone_after / 100)
                got.gone = True
                return got
            response = connection.getresponse()
            if response.status != 200:
                got.fault = f"{response.status} {response.read(500).decode(errors='replace')}"
            elif ask.body.get("stream"):
                _read_stream(response, ask, got, start)
            else:
                _take(json.loads(response.read()), ask, got)
    except (OSError, ValueError, KeyError) as e:
        got.fault = f"{type(e).__name__}: {e}"
    return got


def _read_stream(response, ask: Ask, got: Answer, start: float) -> None:
    pieces = 0
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            got.fault = event["error"]["message"]
            return
        _take(event, ask, got)
        if got.first_s is None and got.tokens:
            got.first_s = time.perf_counter() - start
        pieces += 1
        if ask.gone_after is not None and pieces > ask.gone_after:
            got.gone = True
            return
    got.fault = "the stream ended without its end"


def _take(values: dict[str, Any], ask: Ask, got: Answer) -> None:
    """Adds the choices of an answer, or of a piece of one."""
    for sample in values.get("samples", ()):
        got.choices[sample["index"]] = Choice(sample["token_ids"], sample["logprobs"], "", sample["finish_reason"])
    for piece in values.get("choices", ()):
        choice = got.choices.setdefault(piece["index"], Choice())
        choice.token_ids += piece.get("token_ids") or ()
        logprobs = piece["logprobs"] or {}
        choice.logprobs += logprobs.get("token_logprobs") or [t["logprob"] for t in logprobs.get("content") or ()]
        message = piece.get("delta") or piece.get("message") or piece
        choice.text += message.get("content") or message.get("text") or ""
        choice.finish_reason = piece["finish_reason"] or choice.finish_reason


def compare(loaded: Answer, alone: Answer) -> tuple[int, int]:
    """(values compared, values that differ): token ids and log-probabilities as integers, the text and how it ended as
    one value each. Of a client that went away what it had got; a sample that is missing differs."""
    values = different = 0
    if not loaded.gone and loaded.choices.keys() != alone.choices.keys():
        return 1, 1
    for index, got in loaded.choices.items():
        want = alone.choices.get(index, Choice())
        n = len(got.token_ids) if loaded.gone else max(len(got.token_ids), len(want.token_ids))
        for mine, other, dtype in ((got.token_ids, want.token_ids, np.int32), (got.logprobs, want.logprobs, np.float32)):
            mine, other = (np.array(x[:n], dtype).view(np.int32) for x in (mine, other))
            same = min(len(mine), len(other))
            values += n
            different += n - same + int((mine[:same] != other[:same]).sum())
        if got.finish_reason or not loaded.gone:
            values += 2
            different += (got.text != want.text) + (got.finish_reason != want.finish_reason)
        else:
            values += 1
            different += not want.text.startswith(got.text)
    return values, different


def load(server: LiveServer, asked: Sequence[Ask], clients: int, *, admin_token: str | None = None) -> Load:
    """`clients` ask everything at once, then one asks it again.

    Args:
      admin_token: the server's; the prefix cache is then emptied in between, so that nothing alone is read from it.
    """
    before, most_running, done = server.settled(), 0, threading.Event()

    def watch() -> None:
        nonlocal most_running
        while not done.wait(0.05):
            most_running = max(most_running, int(server.metrics()["running"]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            loaded = list(pool.map(lambda ask: answer(server, ask), asked))
    finally:
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    leak = None
    try:
        after = server.settled()
        if admin_token is not None:
            server.ask("/admin/reset_prefix_cache", {}, Authorization=f"Bearer {admin_token}")
        alone = [answer(server, dataclasses.replace(ask, gone_after=None)) for ask in asked]
        server.settled()
    except Faulty as e:
        leak, after, alone = str(e), server.metrics(), [Answer() for _ in asked]
    values, different, where = 0, 0, []
    for i, (got, want) in enumerate(zip(loaded, alone, strict=True)):
        if not got.fault and not want.fault:
            more, wrong = compare(got, want)
            values, different = values + more, different + wrong
            where += [i] if wrong else []
    return Load(
        requests=len(asked),
        gone=sum(got.gone for got in loaded),
        tokens=sum(got.tokens for got in loaded),
        values=values,
        different=different,
        where=where,
        faults=[f"request {i}: {got.fault}" for i, got in _enumerated(loaded, alone) if got.fault],
        leak=leak,
        seconds=seconds,
        first_s=[got.first_s for got in loaded if got.first_s is not None],
        preemptions=int(after["preemptions"] - before["preemptions"]),
        prefix_hits=int(after["prefix_hits"] - before["prefix_hits"]),
        most_running=most_running,
    )


def _enumerated(*lists: list[Answer]) -> Iterator[tuple[int, Answer]]:
    for answers in lists:
        yield from enumerate(answers)


def print_load(found: Load, clients: int, console: rich.console.Console) -> None:
    """The figures as a table, then what is wrong."""
    table = rich.table.Table(header_style="bold", title=f"{found.requests} requests of {clients} clients")
    table.add_column("what")
    table.add_column("", justify="right")
    first = [f"{np.quantile(found.first_s, q) * 1e3:,.0f}" if found.first_s else "-" for q in (0.5, 0.99)]
    for name, value in (
        ("requests/s", f"{found.requests / found.seconds:,.1f}"),
        ("tokens/s", f"{found.tokens / found.seconds:,.0f}"),
        ("time to first token of a stream, ms, median", first[0]),
        ("the same, 99th percentile", first[1]),
        ("clients that went away", f"{found.gone}"),
        ("most samples side by side", f"{found.most_running}"),
        ("preemptions", f"{found.preemptions}"),
        ("pages found in the prefix cache", f"{found.prefix_hits}"),
        ("values compared with the same request alone", f"{found.values:,}"),
        ("values that differ", f"{found.different:,}"),
    ):
        table.add_row(name, value)
    console.print(table)
    if found.where:
        console.print(f"requests whose bits differ: {found.where[:20]}")
    for fault in found.faults[:20]:
        console.print(fault, markup=False)
    if found.leak:
        console.print(found.leak, markup=False)


def record(found: Load, model: str, clients: int, command: str, gpu: str, path: pathlib.Path = report.RESULTS) -> None:
    """Appends the figures to results.jsonl; raises report.ResultsError when a value differs, as no reason excuses that."""
    name = "".join(c if c.isalnum() else "-" for c in model.lower())
    work = f"{clients} clients, {found.requests} mixed requests to {model}, {found.gone} of them left midway, {found.preemptions} preemptions"
    common = {"area": "engine", "command": command, "gpu": gpu, "path": path}
    report.record(id=f"server-load-{name}", work=f"{work}: values whose bits differ from the same request alone, of {found.values:,}",
                  metric="values", ours=found.different, target="== 0", **common)  # fmt: skip
    report.record(id=f"server-load-{name}-rate", work=work, metric="tokens/s", ours=round(found.tokens / found.seconds, 1), **common)
    if found.first_s:
        report.record(id=f"server-load-{name}-first-token", work=f"{work}: 99th percentile of the time to the first token of a stream",
                      metric="s", ours=round(float(np.quantile(found.first_s, 0.99)), 4), **common)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when something differs, failed or leaked, 2 when there is no server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="at one time (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="in all (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a sample (default: a quarter of max_model_len)")
    parser.add_argument("--prompt-bytes", type=int, help="longest prompt (default: half of max_model_len)")
    parser.add_argument("--gone", type=float, default=0.1, help="share of the clients that go away (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: %(default)s)")
    parser.add_argument("--admin-token", help="the server's: its prefix cache is then emptied before requests run alone")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--record", action="store_true", help="append them to benchmarks/results.jsonl")
    parser.add_argument("--gpu", help="what the server runs on, for --record (default: this machine)")
    args = parser.parse_args(argv)
    try:
        server = LiveServer(args.url)
        model = server.model()
    except (ValueError, Faulty) as e:
        print(e, file=sys.stderr)
        return 2
    room = model["max_model_len"]
    asked = asks(
        server,
        args.requests,
        longest=args.prompt_bytes or room // 2,
        max_tokens=args.max_tokens or room // 4,
        gone=args.gone,
        seed=args.seed,
    )
    found = load(server, asked, args.clients, admin_token=args.admin_token)
    print_load(found, args.clients, rich.console.Console())
    if args.json:
        args.json.write_text(json.dumps(dataclasses.asdict(found)) + "\n")
    if args.record and found.passed:
        command = f"python -m benchmarks.serve_load --clients {args.clients} --requests {args.requests} --seed {args.seed}"
        record(found, model["id"], args.clients, command, args.gpu or report.this_machine())
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
