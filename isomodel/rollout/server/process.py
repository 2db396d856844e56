"""DrainingServer: uvicorn, with a SIGTERM that lets requests in flight finish."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from isomodel.rollout.server.app import create_app
from isomodel.rollout.server.service import Service

CLOSING_SECONDS = 5
"""For connections to close, once no request is left or a second signal has ended them."""


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT new requests get 503, those in flight finish, then it exits. A second one ends them."""

    def __init__(self, service: Service, on_ready: Callable[[], None] = lambda: None):
        """Serves at the sockets that `run` is given; `on_ready` is called once it answers there."""
        config = uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
        self._service, self._on_ready = service, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of uvicorn: called on a signal."""
        name = signal.Signals(sig).name
        if not self._service.draining:
            self._service.drain()
            left = len(self._service.runs)
            print(f"{name}: {left} requests in flight finish, no new ones; once more ends them", file=sys.stderr)
        else:
            self._service.thread.abort_all("the server was told to end at once")
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Of uvicorn: ten times a second; true ends the server."""
        if self._service.draining and not self._service.runs:
            self.should_exit = True
        return await super().on_tick(counter)
