"""A server on loopback that answers as a test tells it: good answers and every bad one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True)
class Reply:
    """One answer. `then`: send it; `cut` it short of its length; `drop` the connection; `hang`."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    then: str = "send"


Script = Callable[[str, dict[str, Any]], Reply]


def completion(
    url: str, body: dict[str, Any], *, choices: int | None = None, **usage: Any
) -> Reply:
    """What a good server would say."""
    told = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, **usage}
    if url == EMBEDDINGS:
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"object": "embedding", "index": k, "embedding": [0.5]} for k in range(len(inputs))]
        return reply({"object": "list", "data": data, "model": "m", "usage": told})
    count = body.get("n", 1) if choices is None else choices
    if url == CHAT:
        text = body["messages"][-1]["content"]
        said = [
            {
                "index": k,
                "message": {"role": "assistant", "content": f"re: {text}"},
                "finish_reason": "stop",
            }
            for k in range(count)
        ]
    else:
        said = [{"index": k, "text": "re", "finish_reason": "stop"} for k in range(count)]
    kind = "chat.completion" if url == CHAT else "text_completion"
    return reply(
        {"id": "x", "object": kind, "created": 0, "model": "m", "choices": said, "usage": told}
    )


def reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(value).encode(), headers)


def error(status: int, message: str, **more: Any) -> Reply:
    return reply({"error": {"message": message, **more}}, status)


class FakeServer:
    """`script` says what it answers; it notes what it was asked, and can be killed and started."""

    def __init__(self, script: Script = completion) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.now = self.most = 0
        self.hangs = False
        self.documents: dict[str, bytes] = {"/v1/models": b"{}"}
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = _Server(("127.0.0.1", self.port), _Handler)
        self.server.fake = self
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def kill(self) -> None:
        """Every connection breaks, and nobody listens any more."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        for connection in list(self.server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.released.set()
        self.kill()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    fake: FakeServer

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that the test broke is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        fake = self.server.fake
        if fake.hangs:
            return self._send(Reply(then="hang"))
        document = fake.documents.get(self.path)
        return self._send(Reply(404, b"no") if document is None else Reply(200, document))

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.asked.append(body)
            fake.headers.append(dict(self.headers))
            fake.now += 1
            fake.most = max(fake.most, fake.now)
        try:
            answer = fake.script(self.path, body)
        finally:
            with fake.lock:
                fake.now -= 1
        self._send(answer)

    def _send(self, answer: Reply) -> None:
        if answer.then == "hang":
            self.server.fake.released.wait(60)
        if answer.then in ("hang", "drop"):
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header(
            "Content-Length", str(len(answer.body) + (9 if answer.then == "cut" else 0))
        )
        self.end_headers()
        self.wfile.write(answer.body)
        self.close_connection = answer.then == "cut"

    def log_message(self, *args: Any) -> None:
        """Tests read what was asked from `asked`."""


@contextlib.contextmanager
def faking(script: Script = completion) -> Iterator[FakeServer]:
    server = FakeServer(script)
    try:
        yield server
    finally:
        server.close()
