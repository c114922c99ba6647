"""Serves the page of runs on this machine only, while they are being trained."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stepgraph.errors import ArgumentError, StepgraphError, StorageError
from stepgraph.report import page
from stepgraph.report.run import Run

HOST = "127.0.0.1"
AFTERWARDS = 5.0  # seconds that the last numbers stay to be asked for


class LiveServer:
    """A server with two answers: the page at `/`, and its data at `/data.json`. Nothing else is given out.

    Args:
        runs: what to show; they are read on as they grow.
        port: where to listen; 0 takes any that is free.
    """

    def __init__(self, runs: Sequence[Run], port: int = 0) -> None:
        if not 0 <= port < 65536:
            raise ArgumentError("report", f"port is {port}", fix="give a number from 0 to 65535")
        self.runs = list(runs)
        self._reading = threading.Lock()
        self._known: tuple[str, bytes] | None = None
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            problem = f"port {port} is taken" if taken else f"port {port} cannot be used: {error.strerror}"
            raise StorageError(
                "report --live", problem, fix="give another --port, or 0 for any that is free"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"

    def serve(self, until_finished: bool = False) -> None:
        """Answers until it is interrupted; with `until_finished` until some seconds after the last run has ended."""
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
        """What the page asks for, and a tag that changes with it."""
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
            def do_GET(self) -> None:
                # Another site's page must not read this one through a name that it lets point here.
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
                headers |= {"Content-Length": str(len(body))} | ({"ETag": tag} if tag else {})
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """The terminal is for the one who trains."""

        return Handler
