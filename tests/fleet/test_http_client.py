"""Requests of commands, to real servers."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fleet.http_client import HTTP_ERRORS, ConnectError, HttpAnswer, get, opened, reason_in
from picker.rpc.self_signed import self_signed


class _Echo(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self._echo()

    def do_GET(self) -> None:
        self._echo()

    def _echo(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        words = (self.command, self.path, content, self.headers.get("authorization", ""))
        text = "|".join(words).encode()
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def echo(wrap: Callable[[socket.socket], socket.socket] = lambda one: one) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        server.socket = wrap(server.socket)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_page_is_what_its_url_says() -> None:
    with echo() as port:
        root = f"http://127.0.0.1:{port}"
        assert get(root, 5.0) == HttpAnswer(200, b"GET|/||")
        assert get(f"{root}/a/b?c=d", 5.0) == HttpAnswer(200, b"GET|/a/b?c=d||")
        with opened(f"{root}/it", 5.0, body=b"text") as response:
            assert response.read() == b"POST|/it|text|"


def test_redirects_are_answers_like_others() -> None:
    with echo() as port:
        assert get(f"http://127.0.0.1:{port}/moved", 5.0).status == 302


def test_credentials_of_a_url_are_sent() -> None:
    with echo() as port:
        answer = get(f"http://me:a%3Ab@127.0.0.1:{port}/", 5.0)
    assert answer.content == b"GET|/||Basic bWU6YTpi"


def test_a_certificate_has_to_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    material, pair = self_signed(), tmp_path / "pair.pem"
    pair.write_bytes(material.private_key + material.certificate_chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    with echo(lambda one: context.wrap_socket(one, server_side=True)) as port:
        url = f"https://localhost:{port}/it"
        with pytest.raises(ConnectError, match="CERTIFICATE"):
            get(url, 5.0)
        monkeypatch.setenv("SSL_CERT_FILE", str(pair))
        assert get(url, 5.0) == HttpAnswer(200, b"GET|/it||")


def test_a_server_that_is_not_there_is_an_error_of_its_own() -> None:
    with pytest.raises(ConnectError, match="refused"):
        get("http://127.0.0.1:1/", 5.0)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx"]
)
def test_half_an_answer_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HTTP_ERRORS):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/", 5.0)
        thread.join()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "too\\n long"}}', "too long"),
        (b'{"error": "no"}', "no"),
        (b"<html>\x1b[2J", "<html> [2J"),
        (b'{"error": {}}', '{"error": {}}'),
        (b"", "(no reason)"),
    ],
)
def test_the_reason_of_a_refusal_is_one_printable_line(body: bytes, reason: str) -> None:
    assert reason_in(body) == reason
