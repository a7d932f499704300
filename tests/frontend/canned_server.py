"""A server that answers with whatever bytes a test wants, right or wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MODELS = b'{"object": "list", "data": [{"id": "canned"}]}'


def whole(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """A complete response."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


def events(*data: object, done: bool = True, content_length: int | None = None) -> bytes:
    """A stream of events, each JSON or already bytes. With a `content_length` beyond them, it breaks off."""
    body = b"".join(b"data: " + (d if isinstance(d, bytes) else json.dumps(d).encode()) + b"\n\n" for d in data)
    body += b"data: [DONE]\n\n" if done else b""
    length = "" if content_length is None else f"content-length: {content_length}\r\n"
    return f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{length}connection: close\r\n\r\n".encode() + body


def chunk(content: str | None = None, finish_reason: str | None = None, **fields: object) -> dict[str, object]:
    """A chunk of a streamed chat completion."""
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}], **fields}


@contextmanager
def canned_server(answer: Callable[[str], bytes | None]) -> Iterator[str]:
    """Yields the base URL. `answer` gets a request's head; None leaves the client waiting."""
    kept: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            response = answer(_head(connection))
            if response is None:
                kept.append(connection)
                continue
            # The client may have seen enough.
            with connection, suppress(ConnectionError):
                connection.sendall(response)
                # Closing with unread bytes would reset the connection before the client has read all.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


def answering(response: bytes | None) -> Callable[[str], bytes | None]:
    """A server with one model, whose chats are answered by `response`."""
    return lambda head: whole(MODELS) if head.startswith("GET /v1/models ") else response


def _head(connection: socket.socket) -> str:
    connection.settimeout(30)
    received = b""
    # A client may leave before it has asked.
    while b"\r\n\r\n" not in received and (piece := connection.recv(1 << 16)):
        received += piece
    return received.split(b"\r\n\r\n")[0].decode()
