"""LiveServer: a running `isomodel serve` as a client sees it, for the load and the fuzzing of any server."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

SECONDS = 600
"""Longest wait for one answer."""
IDLE = ("running", "waiting", "pages_in_use")
"""Metrics that are 0 when nothing runs: a page that is held then is a leak."""


class Faulty(RuntimeError):
    """The server did what it must not."""


class LiveServer:
    """Asks one server; every call has a connection of its own, so threads may share this."""

    def __init__(self, url: str):
        """`url`: as http://127.0.0.1:8000. Raises ValueError when it is no such thing."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{url!r} is not like http://127.0.0.1:8000")
        self.url, self._host, self._port = url.rstrip("/"), parts.hostname, parts.port or 80

    def open(self) -> http.client.HTTPConnection:
        """A connection that the caller closes."""
        return http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)

    def socket(self) -> socket.socket:
        """A connection for what is no HTTP."""
        return socket.create_connection((self._host, self._port), SECONDS)

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        """A connection; leaving it open inside and coming out is how a client goes away."""
        connection = self.open()
        try:
            yield connection
        finally:
            connection.close()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a POST of JSON, or of a GET without a body."""
        with self.connection() as connection:
            raw = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, raw, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def model(self) -> dict[str, Any]:
        """The served model's entry of /v1/models; `max_model_len` is one of its fields.

        Raises:
          Faulty: nobody answers there, or not as this server does.
        """
        try:
            return self.ask("/v1/models")[1]["data"][0]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as e:
            raise Faulty(f"no `isomodel serve` answers at {self.url} ({type(e).__name__}: {e}); is it up yet?") from e

    def metrics(self) -> dict[str, float]:
        """The engine's totals and gauges by their short names, such as `pages_in_use`."""
        with self.connection() as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return {name: float(x) for name, x in re.findall(r"^isomodel_(\w+?)(?:_total)? (\S+)$", text, re.MULTILINE)}

    def settled(self, seconds: float = 60) -> dict[str, float]:
        """Waits until nothing runs or waits; returns the metrics then.

        Raises:
          Faulty: it still holds something then (a page, say), or it is not well.
        """
        end = time.monotonic() + seconds
        while any((metrics := self.metrics())[name] for name in IDLE):
            if time.monotonic() > end:
                raise Faulty("idle for long and yet: " + ", ".join(f"{name} {metrics[name]:g}" for name in IDLE))
            time.sleep(0.02)
        if (health := self.ask("/health")) != (200, {"status": "ok", "reason": None}):
            raise Faulty(f"/health says {health}")
        return metrics
