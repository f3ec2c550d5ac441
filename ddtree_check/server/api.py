"""Completions of an OpenAI-compatible server: bounded in time and size, repeated with back-off, checked."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from ..base.errors import Unsupported, UsageError

LARGEST = 16 * 2**20  # bytes of an answer: the echo of 60,000 tokens with five others each
UNUSABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)  # of who reads one
HIDDEN = "***"
LONGEST_PAUSE = 30.0  # seconds between two attempts, whatever the server asks for
SLACK = 1e-3  # a sum of rounded probabilities may exceed 1
AGAIN = (408, 409, 425, 429)  # and everything from 500


class Failed(Exception):
    """The server gave no usable answer, however often it was asked. The text says what it did."""


@dataclass(frozen=True)
class Completion:
    """An answer of a server. tops: for each token the log-probabilities of the likeliest, {} where it gave none.

    prompt_tokens: how many it counted, None if it does not say; ended: whether the text ended by itself.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    tops: tuple[dict[str, float], ...]
    prompt_tokens: int | None
    ended: bool


def clean_url(what: str, url: str) -> str:
    """Return the URL of an API up to and with /v1, without query. Raises UsageError for anything but http(s), and for
    one that holds a name or password; neither is shown."""
    shown = re.sub(r"//[^/]*@", f"//{HIDDEN}@", re.sub(r"[?#].*", f"?{HIDDEN}", url, flags=re.DOTALL))
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no port, no IPv6 address
        good = False
    if not good or not url.isprintable():
        raise UsageError(f"{what}: got {shown!r:.80}, expected an address such as http://localhost:30000/v1")
    if "@" in parts.netloc:
        raise UsageError(f"{what}: the address holds a name or password; expected --api-key-env NAME instead")
    path = parts.path.rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path if path.endswith("/v1") else f"{path}/v1", "", ""))


class Api:
    """One server. timeout: seconds for a whole answer; retries: attempts after the first. Safe to use from threads.

    The requests run in an event loop of their own, where the deadline holds whatever a read waits for. The key is
    hidden in all that the server says.
    """

    def __init__(
        self,
        what: str,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        sleep: Callable[[float], object] | None = None,
    ):
        import httpx2
        from anyio.from_thread import start_blocking_portal

        self.what, self.url, self.model = what, clean_url(what, url), model
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise UsageError(f"{what}: the key holds a character that no header can, expected printable ASCII")
        self._key, self._timeout, self._retries = key, timeout, retries
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        secure = self.url.startswith("https:")  # reading the certificates takes time
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, follow_redirects=False, verify=secure)
        self._running = contextlib.ExitStack()
        self._portal = self._running.enter_context(start_blocking_portal())

    def close(self) -> None:
        """End the connections; who still asks gets Failed, without another attempt."""
        self._retries = 0
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # closed before
            self._portal.call(self._client.aclose)
            self._portal.call(self._portal.stop, True)
        self._running.close()

    def start(self) -> str:
        """Return the model's name, the first that the server lists if none was chosen.

        Raises UsageError if it cannot be reached or knows no such model.
        """
        try:
            data = self._ask("GET", "models", None, _models)
        except Failed as error:
            raise UsageError(f"{self.what}: {error}; expected a server that answers there") from None
        if not data:
            raise UsageError(f"{self.what}: {self.url} lists no model, expected one")
        if self.model is not None and self.model not in data:
            raise UsageError(f"{self.what}: {self.url} has no model {self.model!r}, expected one of {', '.join(data)}")
        self.model = self.model or data[0]
        return self.model

    def complete(self, prompt: str, tokens: int, top: int, *, echo: bool = False) -> Completion:
        """Return a greedy completion with log-probabilities; echo: those of the prompt as well.

        Raises Failed, Unsupported for a request that the server refuses, and UsageError where it wants a key.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": top}
        return self._ask("POST", "completions", body | ({"echo": True} if echo else {}), _completion)

    def _ask(self, verb: str, path: str, body: dict | None, read: Callable):
        """Return what `read` makes of the answer; one that it cannot use is no answer."""
        for attempt in itertools.count():
            pause = min(LONGEST_PAUSE, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)  # not all clients at one time
            try:
                status, asked, content = self._portal.call(self._send, verb, path, body)
            except TimeoutError:
                said = f"no whole answer within {self._timeout:g} s"
            except (OSError, RuntimeError, ValueError, CancelledError, *self._errors()) as error:
                # RuntimeError and CancelledError: the client was closed
                said = self._hide(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            else:
                if status < 300:
                    try:
                        return read(self._parse(content))
                    except UNUSABLE as error:
                        why = f"{type(error).__name__}: {self._hide(str(error))[:100]}"
                        said = f"an answer that cannot be used ({why})"
                elif status in AGAIN or status >= 500:
                    said = f"status {status}"
                    pause = min(LONGEST_PAUSE, max(pause, asked))
                else:
                    self._refused(status, path, content)
            if attempt >= self._retries:
                raise Failed(f"{self.url}/{path}: {said}, {attempt + 1} times")
            self._sleep(pause)

    async def _send(self, verb: str, path: str, body: dict | None) -> tuple[int, float, bytes]:
        """Return status, the pause that the server asks for, and the body. Raises TimeoutError when the time is up."""
        from anyio import fail_after

        with fail_after(self._timeout):
            async with self._client.stream(verb, f"{self.url}/{path}", json=body) as answer:
                if coding := answer.headers.get("content-encoding", "identity").replace("identity", ""):
                    raise OSError(f"an answer in the encoding {coding!r:.40}, expected none")
                parts, size = [], 0
                async for part in answer.aiter_raw():
                    size += len(part)
                    parts.append(part)
                    if size > LARGEST:
                        raise OSError(f"an answer of more than {LARGEST} bytes")
                asked = answer.headers.get("retry-after", "")
                return answer.status_code, float(asked) if asked.isdecimal() else 0.0, b"".join(parts)

    @staticmethod
    def _errors() -> tuple[type[Exception], ...]:
        import httpx2

        return httpx2.HTTPError, httpx2.InvalidURL

    def _parse(self, content: bytes) -> object:
        """Return the value of a JSON answer, the key hidden however the answer escapes it."""
        if not self._key:
            return json.loads(content)
        return json.loads(self._hide(json.dumps(json.loads(content), ensure_ascii=False), json.dumps(self._key)[1:-1]))

    def _hide(self, text: str, key: str | None = None) -> str:
        key = key or self._key
        return text.replace(key, HIDDEN) if key else text

    def _refused(self, status: int, path: str, content: bytes) -> None:
        text = " ".join(self._hide(content.decode(errors="replace")).split())[:200]
        if status in (401, 403):
            raise UsageError(f"{self.what}: status {status}: {text}; expected --api-key-env with a key that it takes")
        if status == 404:
            raise UsageError(
                f"{self.what}: {self.url}/{path}: status 404: {text}; expected an OpenAI-compatible server"
            )
        raise Unsupported(f"{self.what}: {self.url}/{path}: status {status}: {text}")


def _models(data: dict) -> list[str]:
    names = [entry["id"] for entry in data["data"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"model {names[0]!r:.40}, expected a name")
    return names


def _completion(data: dict) -> Completion:
    """Read an answer. Raises ValueError and the like for one that is not whole, Unsupported without logprobs."""
    choice = data["choices"][0]
    text, found = choice["text"], choice.get("logprobs")
    if not isinstance(text, str):
        raise ValueError(f"text {text!r:.40}, expected a string")
    if found is None:
        raise Unsupported("the server gives no logprobs; start it so that it does")
    tokens, logprobs, tops = found["tokens"], found["token_logprobs"], found.get("top_logprobs") or []
    tops = tops or [{}] * len(tokens)
    if not len(tokens) == len(logprobs) == len(tops):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(tops)} tops, expected one of each")
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("tokens that are not strings")
    count = (data.get("usage") or {}).get("prompt_tokens")
    numbers = [{str(token): _number(value) for token, value in (top or {}).items()} for top in tops]
    return Completion(
        text,
        tuple(tokens),
        tuple(None if value is None else _number(value) for value in logprobs),
        tuple({token: value for token, value in top.items() if value is not None} for top in numbers),
        count if isinstance(count, int) else None,
        choice.get("finish_reason") not in (None, "length"),
    )


def _number(value: object) -> float | None:
    """Return a log-probability; None for that of what cannot be. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > SLACK:
        raise ValueError(f"log-probability {value!r:.40}, expected a number of at most 0")
    return float(value) if math.isfinite(value) else None
