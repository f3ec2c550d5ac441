"""A small server that speaks the completions API: a language model made of hashes, with faults to choose."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCAB = "abcdefghij "
END = "\n"  # ends a text, and is no token of it


@dataclass
class Toy:
    """What a server does. noise: nats by which decoding, and forced text, differ from exact arithmetic.

    wrong      position -> place in the order of likelihood of the token to emit there (1: the second)
    leak       (first position, nats): from there on decoded log-probabilities are off
    seed       another model;  pairs: "ab" is one token where a text is read;  ends_at: ends the text there
    echo, logprobs   whether it can;  fail: a function of the number of the request -> what to send instead, or None
    models     what it answers when asked for its models
    near_tie   a letter after which the two likeliest tokens lie nearer than the noise
    """

    noise: float = 1e-4
    wrong: dict[int, int] = field(default_factory=dict)
    leak: tuple[int, float] | None = None
    seed: int = 0
    pairs: bool = False
    ends_at: int | None = None
    echo: bool = True
    logprobs: bool = True
    near_tie: str = ""
    models: bytes = b'{"data": [{"id": "toy"}]}'
    fail: object = None
    requests: int = 0
    most_at_once: int = 0
    busy: int = 0
    lock: object = field(default_factory=threading.Lock)

    def rows(self, text: str, kind: str, prompt: int) -> dict[str, float]:
        """Log-probabilities after a text; kind: decode or forced, which round differently."""
        place = len(text) - prompt
        logits = {token: 6 * _unit(self.seed, text[-12:], token) for token in VOCAB}
        if self.near_tie and text.endswith(self.near_tie):
            first, second = sorted(logits, key=logits.get, reverse=True)[:2]
            logits[second] = logits[first] - self.noise / 10
        for token in logits:
            logits[token] += self.noise * (_unit(kind, self.seed, text[-12:], token) - 0.5)
        if self.leak and kind == "decode" and place >= self.leak[0]:
            for token in logits:
                logits[token] += self.leak[1] * (_unit("leak", text[-12:], token) - 0.5)
        total = math.log(sum(math.exp(value) for value in logits.values()))
        return {token: value - total for token, value in logits.items()}

    def read(self, text: str) -> list[str]:
        """A text cut into tokens."""
        if not self.pairs:
            return list(text)
        found = []
        for letter in text:
            if found and found[-1] + letter == "ab":
                found[-1] = "ab"
            else:
                found.append(letter)
        return found

    def complete(self, body: dict) -> dict:
        prompt, top = body["prompt"], body["logprobs"]
        tokens, logprobs, tops = [], [], []
        if body.get("echo"):
            start = ""
            for token in self.read(prompt):
                row = self.rows(start, "forced", 0) if start else {}
                tokens.append(token)
                logprobs.append(row.get(token[-1]) if row else None)
                tops.append(_top(row, top) if row else None)
                start += token
        text, reason, known = prompt, "length", len(prompt)
        for place in range(body["max_tokens"]):
            if self.ends_at is not None and len(text) - known >= self.ends_at:
                reason = "stop"
                break
            row = self.rows(text, "decode", known)
            token = sorted(row, key=row.get, reverse=True)[self.wrong.get(place, 0)]
            tokens.append(token)
            logprobs.append(row[token])
            tops.append(_top(row, top))
            text += token
        found = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": [-1] * len(tokens)}
        choice = {"index": 0, "text": text if body.get("echo") else text[known:], "finish_reason": reason}
        choice["logprobs"] = found if self.logprobs else None
        return {"choices": [choice], "usage": {"prompt_tokens": len(self.read(prompt))}}


def _unit(*words: object) -> float:
    digest = hashlib.blake2b(repr(words).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _top(row: dict[str, float], top: int) -> dict[str, float]:
    return {token: row[token] for token in sorted(row, key=row.get, reverse=True)[:top]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has gone is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, self.server.toy.models)

    def do_POST(self):
        toy: Toy = self.server.toy
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with toy.lock:
            toy.requests += 1
            toy.busy += 1
            toy.most_at_once = max(toy.most_at_once, toy.busy)
            number = toy.requests
        try:
            what = toy.fail(number) if toy.fail else None
            if body.get("echo") and not toy.echo:
                what = (400, b'{"message": "echo is not supported"}')
            if isinstance(what, float):
                time.sleep(what)
                what = None
            if what == "truncated":
                return self._send(200, json.dumps(toy.complete(body)).encode(), promise=100)
            self._send(*(what or (200, json.dumps(toy.complete(body)).encode())))
        finally:
            with toy.lock:
                toy.busy -= 1

    def _send(self, status: int, content: bytes, promise: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content) + promise))
        self.end_headers()
        self.wfile.write(content)
        if promise:
            self.close_connection = True


@contextlib.contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """The address of a server in this process."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.toy = toy
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def dripping(first: bytes, again: bytes, pause: float) -> Iterator[str]:
    """The address of a server that answers with `first` and then, for good, with `again` every `pause` seconds."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            with contextlib.suppress(OSError):
                self.request.sendall(first)
                while not over.wait(pause if again else 0.1):
                    self.request.sendall(again)

    over = threading.Event()
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
