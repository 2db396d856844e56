"""Sends a running server what no client should: it must answer with its own errors, keep its bits, and leak nothing.

    isomodel serve MODEL &
    python -m benchmarks.serve_fuzz --url http://127.0.0.1:8000 --requests 100000

One part of the requests is made from the server's own description (schemathesis, valid and invalid ones), the rest at
random: valid bodies, the same with fields changed, lost and added, with bytes changed, random JSON, deep nesting, bytes that
are no JSON, wrong methods and paths, HTTP that is none, clients that go away. One request is asked again and again in
between, and must keep its bits. Exit code 1: an answer of 500 or above, none at all, one that /openapi.json does not
describe, other bits, or something held when idle. Give the server a small model and small limits: valid requests run.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import random
import socket
import sys
from collections.abc import Callable

import rich.console
import rich.table

from benchmarks import report
from benchmarks.live_server import SECONDS, Faulty, LiveServer

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/rollout")
KNOWN = {"prompt_ids": [1, 2, 3], "max_tokens": 6, "seed": 1, "temperature": 0.7}
"""The request whose bits must not change."""
WATCH = 500
"""Requests between two looks at it."""
THREADS = 8
DESCRIBED = 0.1
"""Share of requests from the description: making them is slow."""
WORDS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n", "max_tokens", "stream", "logprobs",
         "echo", "model", "prompt", "messages", "prompt_ids", "stream_options", "tools", "top_logprobs",
         "chat_template_kwargs", "return_token_ids", "best_of", "user", "ignore_eos", "prompt_logprobs")  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW")


@dataclasses.dataclass
class Found:
    """What fuzzing showed.

    Attributes:
      sent: requests by kind. statuses: of the answers, by kind; "none" for those that were given none on purpose.
      faults: what must not be, each with what was sent. watched: looks at the known request; known: its samples.
      leak: what the server held when idle, or None.
    """

    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    statuses: dict[str, collections.Counter] = dataclasses.field(default_factory=lambda: collections.defaultdict(collections.Counter))
    faults: list[str] = dataclasses.field(default_factory=list)
    watched: int = 0
    leak: str | None = None
    known: list[dict] | None = None

    @property
    def passed(self) -> bool:
        return bool(self.sent) and not (self.faults or self.leak)

    def add(self, kind: str, status: int | str) -> None:
        self.sent[kind] += 1
        self.statuses[kind][str(status)] += 1


# Bodies


def valid(rng: random.Random, path: str) -> dict:
    """A body that the route takes, if the model has a vocabulary of 256 and a chat template that takes users."""
    body = {"max_tokens": rng.randint(1, 8), "n": rng.choice((1, 1, 2)), "temperature": rng.choice((0, 0.7, 1, 1.5))}
    ids = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
    text = "".join(chr(rng.choice((*range(32, 127), 233, 26085, 128512))) for _ in range(rng.randint(1, 20)))
    extra = {"top_p": 0.9, "top_k": 5, "min_p": 0.05, "seed": rng.getrandbits(64), "stop": text[:3], "ignore_eos": True,
             "stop_token_ids": ids[:3]}  # fmt: skip
    body |= {name: extra[name] for name in rng.sample(list(extra), 2)}
    if path == "/v1/rollout":
        return body | {"prompt_ids": rng.choice((ids, [ids, ids[:2]]))}
    body |= {"stream": rng.random() < 0.3, "return_token_ids": rng.random() < 0.5}
    if path == "/v1/completions":
        return body | {"prompt": rng.choice((text, ids, [text, "b"], [ids]))} | rng.choice(({}, {"logprobs": 0}))
    parts = rng.choice((text, [{"type": "text", "text": text}]))
    return body | {"messages": [{"role": "user", "content": parts}]} | rng.choice(({}, {"logprobs": True}))


def junk(rng: random.Random, depth: int = 0):
    """A value of JSON that no field expects."""
    kind = rng.randrange(15 if depth < 3 else 11)
    if kind >= 13:
        return {rng.choice(WORDS): junk(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    if kind >= 11:
        return [junk(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return (
        None, True, False, 0, -1, rng.getrandbits(rng.choice((8, 31, 32, 63, 64, 65, 2000))), -(2**63) - 1,
        rng.choice((1e308, -1e308, 5e-324, 1e-39, 0.1, -0.0)), "", rng.choice(("\0", "é" * 300, "\ud800", "0", "<|im_start|>")),
        "x" * rng.randint(0, 3000),
    )[kind]  # fmt: skip


def changed(rng: random.Random, path: str) -> bytes:
    """A valid body with a few of its fields changed, lost, renamed or added."""
    body = valid(rng, path)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice((*body, *WORDS))
        match rng.randrange(4):
            case 0:
                body.pop(name, None)
            case 1:
                body[name + rng.choice("xs_")] = body.pop(name, 1)
            case 2 if isinstance(body.get(name), list) and body[name]:
                body[name] = [*body[name], junk(rng)]
                rng.shuffle(body[name])
            case _:
                body[name] = junk(rng)
    return json.dumps(body).encode()


def cut(rng: random.Random, path: str) -> bytes:
    """A valid body with some of its bytes changed, lost, doubled or added."""
    raw = bytearray(json.dumps(valid(rng, path), ensure_ascii=False).encode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                raw[at : at + 1] = rng.randbytes(1)
            case 1:
                raw[at:at] = rng.choice((b"\xff", b"\x00", b"\\u", b'"', b"{", b"]", b"1e999", b"NaN", b",", b"\xc3"))
            case 2:
                del raw[at : at + rng.randint(1, 20)]
            case _:
                raw[at:at] = raw[at : at + 20]
    return bytes(raw)


def nested(rng: random.Random, path: str) -> bytes:
    """Values so deep or numbers so long that a parser may give up."""
    depth = rng.choice((10, 500, 5000))
    open_, close = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    value = rng.choice((open_ * depth + b"1" + close * depth, b"9" * depth, b"-1e" + b"9" * depth, b"0." + b"1" * depth))
    name = rng.choice(WORDS).encode()
    good = json.dumps(valid(rng, path)).encode()
    return rng.choice((value, b'{"' + name + b'":' + value + b"}", good[:-1] + b', "' + name + b'":' + value + b"}"))


BODIES: dict[str, Callable[[random.Random, str], bytes]] = {
    "valid": lambda rng, path: json.dumps(valid(rng, path)).encode(),
    "fields changed": changed,
    "bytes changed": cut,
    "random JSON": lambda rng, path: json.dumps(junk(rng)).encode(),
    "deep or long": nested,
    "random bytes": lambda rng, path: rng.randbytes(rng.randint(0, 400)),
}
OTHERS = ("wrong method or path", "no HTTP", "client goes away")
SHARES = {"fields changed": 45, "bytes changed": 20, "valid": 10, "random JSON": 6, "deep or long": 6, "random bytes": 3,
          "wrong method or path": 5, "no HTTP": 2, "client goes away": 3}  # fmt: skip


# Sending


class Sender:
    """Sends random requests over one connection, which it opens anew where a request ends it."""

    def __init__(self, server: LiveServer, seed: int, found: Found):
        self._server, self._rng, self._found = server, random.Random(seed), found
        self._connection: http.client.HTTPConnection | None = None

    def run(self, numbers) -> None:
        """Sends as many as it takes of `numbers`, an iterator that the senders share."""
        for number in numbers:
            if number % WATCH == 0:
                watch(self._server, self._found)
            (kind,) = self._rng.choices(list(SHARES), SHARES.values())
            path = self._rng.choice(PATHS)
            if kind in OTHERS:
                {OTHERS[0]: self._elsewhere, OTHERS[1]: self._no_http, OTHERS[2]: self._goes}[kind](kind, path)
            else:
                self._ask(kind, "POST", path, BODIES[kind](self._rng, path))
        self._close()

    def _close(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def _ask(self, kind: str, method: str, path: str, raw: bytes, headers: dict[str, str] | None = None) -> None:
        what = f"{method} {path} {raw[:300]!r} {headers}"
        for again in (True, False):
            try:
                self._connection = self._connection or self._server.open()
                self._connection.request(method, path, raw, headers or {})
                answer = self._connection.getresponse()
                body = answer.read()
                break
            except (OSError, http.client.HTTPException) as e:
                self._close()
                if not again:  # at first the server may just have closed what nobody used
                    self._found.add(kind, "none")
                    self._found.faults.append(f"no answer ({type(e).__name__}: {e}) to {what}")
                    return
        if answer.will_close:
            self._close()
        self._found.add(kind, answer.status)
        if fault := wrong(answer, body, path, method):
            self._found.faults.append(f"{answer.status}, {fault}, to {what}")

    def _elsewhere(self, kind: str, path: str) -> None:
        rng = self._rng
        path = rng.choice((path, path + "/", path + "?a=%00&n=1", "/admin/pause", "/admin/update_weights", "/v1/models/" + "é%2F" * 9,
                           "/" + "a" * 3000, "/%00", "//", "/health", "/metrics", "/v1", "/openapi.json"))  # fmt: skip
        headers = rng.choice(({}, {"Authorization": "Bearer \xff"}, {"Content-Type": "text/html"}, {"Content-Encoding": "gzip"},
                              {"Accept": "image/png"}, {"X-A": "b" * 5000}, {"Expect": "100-continue"}))  # fmt: skip
        self._ask(kind, rng.choice(METHODS[:-2] if "admin" in path else METHODS), path.replace("é", "%C3%A9"), rng.randbytes(20), headers)

    def _no_http(self, kind: str, path: str) -> None:
        """Lines that are no request; the server may answer or hang up, both at once."""
        rng = self._rng
        raw = rng.choice((
            rng.randbytes(200), b"GET\r\n\r\n", b"POST " + path.encode() + b" HTTP/9.9\r\n\r\n", b"\r\n" * 50,
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
            b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        ))  # fmt: skip
        with self._server.socket() as s:
            s.sendall(raw)
            s.shutdown(socket.SHUT_WR)
            with_answer = s.recv(200)
        status = int(with_answer.split()[1]) if with_answer.startswith(b"HTTP/1.1 ") else "none"
        self._found.add(kind, status)
        if status != "none" and status >= 500:
            self._found.faults.append(f"{status} to {raw[:300]!r}")

    def _goes(self, kind: str, path: str) -> None:
        """A body that stops in its middle, or an answer that nobody waits for."""
        raw = json.dumps(valid(self._rng, path) | {"max_tokens": 40}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
        with self._server.socket() as s:
            s.sendall(head + raw[: self._rng.choice((0, len(raw) // 2, len(raw)))])
        self._found.add(kind, "none")


def wrong(answer: http.client.HTTPResponse, body: bytes, path: str, method: str) -> str | None:
    """What an answer must not be; None: it is well."""
    if answer.status >= 500:
        return f"{body[:300]!r}"
    if answer.status < 400 or method == "HEAD" or b"Invalid HTTP request" in body:
        return None
    try:
        error = json.loads(body)["error"]
        return None if error["message"] and error.keys() == {"message", "type", "param", "code"} else "an error without its parts"
    except (ValueError, KeyError, TypeError):
        return f"an error that is none of ours: {body[:200]!r}"


def described(server: LiveServer, count: int, seed: int, found: Found) -> None:
    """About `count` requests from /openapi.json, half of them valid by it; answers must be as it says."""
    import schemathesis

    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [op for result in schema.get_all_operations() if (op := result.ok()).path in PATHS or op.method == "get"]
    most = {path: max(1, count // (len(PATHS) * len(schemathesis.GenerationMode))) for path in PATHS}
    for op, mode in itertools.product(operations, schemathesis.GenerationMode):
        found.faults += _described(server, op, mode, most.get(op.path, 20), seed, found)
        watch(server, found)


def _described(server: LiveServer, op, mode, most: int, seed: int, found: Found) -> list[str]:
    """Faults of at most `most` requests of one operation."""
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.failures import FailureGroup
    from schemathesis.specs.openapi import checks

    wanted = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    faults = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=most,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(op.as_strategy(generation_mode=mode))
    def send(case):
        response = case.call(base_url=server.url, timeout=SECONDS)
        found.add(f"described, {mode.value}", response.status_code)
        try:
            case.validate_response(response, checks=wanted)
        except FailureGroup as e:
            faults.append(f"{op.label}: {e}")

    try:
        send()
    except hypothesis.errors.Unsatisfiable:  # there is nothing that such a route could be sent
        pass
    except Exception as e:
        faults.append(f"{op.label}: {type(e).__name__}: {e}")
    return faults


def watch(server: LiveServer, found: Found) -> None:
    """Looks at the known request: its bits must be those of the first look."""
    status, answer = server.ask("/v1/rollout", KNOWN)
    found.watched += 1
    if status != 200:
        found.faults.append(f"the known request is answered with {status}: {answer}")
        return
    found.known = found.known or answer["samples"]
    if answer["samples"] != found.known:
        found.faults.append("the known request has other bits than at first")


def fuzz(server: LiveServer, count: int, *, seed: int = 0, share: float = DESCRIBED) -> Found:
    """`count` requests, `share` of them from the description; then looks whether anything is left."""
    found = Found()
    watch(server, found)
    if share:
        described(server, int(count * share), seed, found)
    numbers = _shared(count - found.sent.total())
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for sent in [pool.submit(Sender(server, seed * THREADS + i, found).run, numbers) for i in range(THREADS)]:
            sent.result()
    watch(server, found)
    try:
        server.settled()
    except Faulty as e:
        found.leak = str(e)
    return found


def _shared(count: int):
    """0 to count - 1, each to one of the threads that take from it (next() of a C iterator is whole)."""
    return iter(itertools.islice(itertools.count(), max(0, count)))


def print_found(found: Found, console: rich.console.Console) -> None:
    """A row a kind, then what must not be."""
    table = rich.table.Table(header_style="bold", title=f"{found.sent.total():,} requests, {len(found.faults)} faults")
    table.add_column("kind")
    for heading in ("requests", "2xx, 3xx", "4xx", "5xx", "no answer"):
        table.add_column(heading, justify="right")
    for kind, sent in sorted(found.sent.items()):
        groups = collections.Counter()
        for status, times in found.statuses[kind].items():
            groups["2" if status[0] in "23" else status[0]] += times
        table.add_row(kind, f"{sent:,}", *(f"{groups[g]:,}" for g in "245n"))
    console.print(table)
    console.print(f"the known request was asked {found.watched} times")
    for fault in found.faults[:20]:
        console.print(fault, markup=False)
    if found.leak:
        console.print(found.leak, markup=False)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when something was found, 2 when there is no server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument(
        "--described", type=float, default=DESCRIBED, help="share of them from the description (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="append the outcome to benchmarks/results.jsonl")
    args = parser.parse_args(argv)
    try:
        server = LiveServer(args.url)
        server.model()
    except (ValueError, Faulty) as e:
        print(e, file=sys.stderr)
        return 2
    found = fuzz(server, args.requests, seed=args.seed, share=args.described)
    print_found(found, rich.console.Console())
    if args.record and found.passed:
        sent, made = found.sent.total(), sum(n for kind, n in found.sent.items() if kind.startswith("described"))
        report.record(
            id="server-fuzz",
            area="engine",
            work=f"{sent:,} requests to isomodel serve, {made:,} of them made from its OpenAPI description: crashes, answers of "
            "500 and above, answers beyond the description, changed bits, pages held at the end",
            metric="faults",
            ours=len(found.faults),
            target="== 0",
            command=f"python -m benchmarks.serve_fuzz --requests {args.requests} --described {args.described} "
            f"--seed {args.seed}",
        )
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
