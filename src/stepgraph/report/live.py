"""Serves the page of runs, on this machine only, while they are training."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stepgraph.errors import ArgumentError, StepgraphError, StorageError
from stepgraph.report import page
from stepgraph.report.run import Run

HOST = "127.0.0.1"
AFTERWARDS = 5.0  # seconds that the last numbers stay available
PATIENCE = 10.0  # seconds that one connection may take in total
CONNECTIONS = 16  # served concurrently


class _Bounded(ThreadingHTTPServer):
    """A server with few threads: slow clients are disconnected, especially when others are waiting."""

    daemon_threads = True
    request_queue_size = 128  # a client that finds the queue full retries after a full second

    def __init__(self, *settings: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # start times, the oldest first
        self._changing = threading.Lock()
        self._free_slots = threading.Semaphore(CONNECTIONS)
        super().__init__(*settings)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in its own thread; if none is free, it replaces the oldest one."""
        if not self._free_slots.acquire(blocking=False):
            self._disconnect(longer_than=0.0, at_most=1)
            if not self._free_slots.acquire(timeout=1.0):
                self.shutdown_request(request)
                return
        with self._changing:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection, then frees its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: socket.socket) -> None:
        with self._changing:
            self._open.pop(request, None)
        self._free_slots.release()

    def service_actions(self) -> None:
        """Called between requests: closes connections that have exceeded their time."""
        self._disconnect(longer_than=PATIENCE, at_most=CONNECTIONS)

    def _disconnect(self, longer_than: float, at_most: int) -> None:
        now = time.monotonic()
        with self._changing:
            late = [request for request, since in self._open.items() if now - since >= longer_than][:at_most]
            for request in late:
                del self._open[request]
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread sees the end of the stream and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that have disconnected; the terminal belongs to the training run."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LiveServer:
    """A server with two responses: the page at `/`, and its data at `/data.json`. It serves nothing else.

    Args:
        runs: what to show; they are reread as they grow.
        port: the port to listen on; 0 uses any free one.
    """

    def __init__(self, runs: Sequence[Run], port: int = 0) -> None:
        if not 0 <= port < 65536:
            raise ArgumentError("report", f"port is {port}", fix="use a number from 0 to 65535")
        self.runs = list(runs)
        self._reading = threading.Lock()
        self._known: tuple[str, bytes] | None = None
        try:
            self._server = _Bounded((HOST, port), self._handler())
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            problem = f"port {port} is taken" if taken else f"port {port} cannot be used: {error.strerror}"
            raise StorageError("report --live", problem, fix="use another --port, or 0 for any free one") from error
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"

    def serve(self, until_finished: bool = False) -> None:
        """Serves until interrupted; with `until_finished`, until some seconds after the last run has ended."""
        asked = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        asked.start()
        try:
            ended = None
            while ended is None or time.monotonic() - ended < AFTERWARDS:
                time.sleep(0.2)
                if until_finished and ended is None and self.finished():
                    ended = time.monotonic()
        finally:
            self.close()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()

    def finished(self) -> bool:
        """Whether every run has ended."""
        with self._reading:
            self._update()
            return all(run.status != "running" for run in self.runs)

    def data(self) -> tuple[str, bytes]:
        """The data of the page, and a tag that changes with it."""
        with self._reading:
            if self._update() or self._known is None:
                tag = f'"{"-".join(str(run.size) for run in self.runs)}"'
                self._known = tag, page.embedded(page.data(self.runs, live=True)).encode()
            return self._known

    def _update(self) -> bool:
        changed = [run.update() for run in self.runs]
        self._known = None if any(changed) else self._known
        return any(changed)

    def page(self) -> bytes:
        """The page itself."""
        with self._reading:
            self._update()
            return page.page(self.runs, live=True).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE  # for one read or write; the server limits the total

            def do_GET(self) -> None:
                # Another site's page must not read this one through a name that resolves to this machine.
                host = self.headers.get("Host", "").rsplit(":", 1)[0]
                if host not in (HOST, "localhost"):
                    self._answer(HTTPStatus.FORBIDDEN, b"ask for 127.0.0.1\n", "text/plain")
                    return
                answers: dict[str, Callable[[], None]] = {"/": self._page, "/data.json": self._data}
                answer = answers.get(self.path)
                if answer is None:
                    self._answer(HTTPStatus.NOT_FOUND, b"there is only / and /data.json\n", "text/plain")
                    return
                try:
                    answer()
                except StepgraphError as error:
                    self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), "text/plain; charset=utf-8")

            def _page(self) -> None:
                self._answer(HTTPStatus.OK, server.page(), "text/html; charset=utf-8")

            def _data(self) -> None:
                tag, body = server.data()
                if self.headers.get("If-None-Match") == tag:
                    self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
                else:
                    self._answer(HTTPStatus.OK, body, "application/json", tag)

            def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
                self.send_response(status)
                headers = {"Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
                headers["Connection"] = "close"
                headers |= {"Content-Length": str(len(body))} | ({"ETag": tag} if tag else {})
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Logs nothing: the terminal belongs to the training run."""

        return Handler
