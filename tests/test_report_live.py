"""The live server and the command: this machine only, two answers, clear errors."""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepgraph as sg
from stepgraph.cli import report
from stepgraph.report import live
from stepgraph.report.record import FILE, Record
from stepgraph.report.run import Run
from tests.report_runs import QUIET, arrays, network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates."""
    made = tmp_path_factory.mktemp("runs") / "one"
    sg.fit(network(), arrays(), run=made, **QUIET)
    return made


@contextlib.contextmanager
def serving(*folders: Path) -> Iterator[tuple[live.LiveServer, int]]:
    server = live.LiveServer([Run(one) for one in folders])
    thread = threading.Thread(target=server._server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server, server._server.server_address[1]
    finally:
        server.close()
        thread.join()


def ask(port: int, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("ETag")
    finally:
        connection.close()


def test_it_gives_out_the_page_and_its_data_and_nothing_else(folder: Path) -> None:
    with serving(folder) as (server, port):
        assert server.url == f"http://127.0.0.1:{port}/"
        status, body, _ = ask(port, "/")
        assert status == 200 and b"connect-src" in body and b'"live":true' in body
        status, body, tag = ask(port, "/data.json")
        assert status == 200 and json.loads(body)["runs"][0]["status"] == "finished"
        assert ask(port, "/data.json", **{"If-None-Match": tag})[0] == 304
        for path in (
            "/run.jsonl",
            "/../../etc/passwd",
            "/%2e%2e/run.jsonl",
            "//etc/passwd",
            "/checkpoints",
            "/data.json?x",
        ):
            assert ask(port, path)[0] == 404
        for host in ("evil.example", "evil.example:80", ""):
            assert ask(port, "/data.json", Host=host)[0] == 403


def test_it_reads_on_as_the_run_grows(folder: Path, tmp_path: Path) -> None:
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join(lines[:4]))
    with serving(tmp_path) as (server, port):
        first = ask(port, "/data.json")
        assert not server.finished() and json.loads(first[1])["runs"][0]["status"] == "running"
        record = Record(tmp_path)
        record.add("steps", first=1, loss=[1.0, 0.5], rate=0.1, rows=16, seconds=0.1, at=0.1)
        status, body, tag = ask(port, "/data.json", **{"If-None-Match": first[2] or ""})
        assert status == 200 and json.loads(body)["runs"][0]["loss"]["y"] == [1.0, 0.5] and tag != first[2]
        with (tmp_path / FILE).open("ab") as file:
            file.write(b"{broken}\n")
        record.close()
        status, body, _ = ask(port, "/data.json")
        assert status == 500 and b"is damaged" in body


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(sg.StorageError, match=r"port \d+ is taken"):
            live.LiveServer([], taken.getsockname()[1])
    with pytest.raises(sg.ArgumentError, match="port is 70000"):
        live.LiveServer([], 70_000)


def test_it_ends_by_itself_some_time_after_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "AFTERWARDS", 0.3)
    began = time.monotonic()
    live.LiveServer([Run(folder)]).serve(until_finished=True)
    assert 0.3 <= time.monotonic() - began < 10


def called(*given: str) -> int:
    parser = argparse.ArgumentParser()
    report.arguments(parser)
    return report.run(parser.parse_args(given))


def test_the_command_writes_pages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "report.html").unlink()
    assert called(str(folder)) == 0 and capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert called(str(folder), "--output", str(tmp_path / "one.html")) == 0
    assert (tmp_path / "one.html").read_text() == (folder / "report.html").read_text()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    assert called(str(folder), str(folder), "--open") == 0
    assert opened == [(tmp_path / "report.html").as_uri()] and (tmp_path / "report.html").stat().st_size < 1_000_000


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(sg.StorageError, match="there is no such folder"):
        called(str(tmp_path / "none"))
    with pytest.raises(sg.RunError, match="holds no run"):
        called(str(folder / "checkpoints"))
    with pytest.raises(sg.StorageError, match="it cannot be written"):
        called(str(folder), "--output", str(tmp_path / "no" / "such" / "page.html"))
    assert called(str(folder), "--output", str(tmp_path / "page.html")) == 0


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_ctrl_c_ends_serving(folder: Path) -> None:
    code = "import argparse, sys; from stepgraph.cli import report; p = argparse.ArgumentParser(); report.arguments(p)"
    code += "; sys.exit(report.run(p.parse_args()))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), "--live"], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert ask(int(url.rstrip("/").rsplit(":", 1)[1]), "/")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


# Clients that are slow, many or gone


def _threads() -> int:
    return threading.active_count()


def test_slow_and_many_clients_take_few_threads_and_nobody_elses_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.5)
    before = _threads()
    with serving(folder) as (_, port), contextlib.ExitStack() as clients:
        for i in range(200):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            client.sendall((b"", b"GET", b"GET / HTTP/1.1\r\nHost: 127", b"GET / HTTP/1.1\r\n")[i % 4])
            assert _threads() - before <= live.CONNECTIONS + 2
        assert ask(port, "/data.json")[0] == 200
        deadline = time.monotonic() + 20
        while _threads() - before > 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _threads() - before <= 2  # that of the server; the slow ones had their time
        assert ask(port, "/data.json")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_client_that_sends_a_byte_now_and_then_is_ended_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.4)
    with serving(folder) as (_, port), socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 10:
                client.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_a_client_that_reads_nothing_or_leaves_is_not_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "PATIENCE", 0.4)
    monkeypatch.setattr(live.LiveServer, "page", lambda self: bytes(50_000_000))
    before = _threads()
    with serving(folder) as (_, port):
        reading = socket.create_connection(("127.0.0.1", port), timeout=10)
        reading.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        leaving = socket.create_connection(("127.0.0.1", port), timeout=10)
        leaving.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        leaving.close()
        deadline = time.monotonic() + 10
        while _threads() - before > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _threads() - before <= 1
        reading.close()
    assert capsys.readouterr().err == ""


def test_connections_are_not_kept(folder: Path) -> None:
    with serving(folder) as (_, port), socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /data.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n")
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert b"\r\nConnection: close\r\n" in answer
