"""The HTTP side of `dtrain serve`: a thread per connection; a slow, broken or leaving client costs nobody else."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

from dtrain.inference import openai_api as api
from dtrain.inference.engine import End, Request, Token
from dtrain.inference.openai_api import ApiError
from dtrain.inference.service import ClassService, TextService
from dtrain.inference.stream_text import TextStream

log = logging.getLogger("dtrain")
LARGEST_BODY = 2**24
MOST_CONNECTIONS = 512
CLIENT_S = 60  # how long a client may take to send or to receive anything
LOOK_S = 0.5  # how often a waiting request looks whether its client is still there


class Gone(Exception):
    """The client has left."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, address: tuple[str, int], service: TextService | ClassService, name: str, key: str | None,
        max_waiting: int = 1024, template: Any = None,
    ) -> None:  # fmt: skip
        self.service, self.name, self.key, self.max_waiting = service, name, key, max_waiting
        self.template = template
        self.began = int(time.time())
        self.draining = False
        self.busy = 0  # requests that are being answered
        self.counting = threading.Lock()
        self.connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection ended", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dtrain", ""
    timeout = CLIENT_S
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    # ---- one request -----------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        self.answer({"/health": self.health, "/v1/models": self.models, f"/v1/models/{self.server.name}": self.model})

    def do_POST(self) -> None:
        self.answer(
            {"/v1/completions": self.complete, "/v1/chat/completions": self.chat, "/v1/classify": self.classify}
        )

    def answer(self, routes: dict[str, Any]) -> None:
        self.streaming = False
        with self.server.counting:
            self.server.busy += 1
        try:
            path = self.path.partition("?")[0]
            if path != "/health":
                self.authorize()
            body = self.body()  # also where it is not needed: the next request follows it
            if path not in routes:
                raise ApiError(404, f"{self.command} {path}: there is no such place here", code="not_found")
            if self.server.draining and path != "/health":
                self.close_connection = True
                raise ApiError(503, "the server is shutting down")
            routes[path](body)
        except ApiError as error:
            self.fail(error)
        except (Gone, OSError):  # a timeout, too
            self.close_connection = True
        except Exception:
            log.exception("%s %s", self.command, self.path)
            self.close_connection = True  # a part of the body may be unread
            self.fail(ApiError(500, "the server has made an error; its log has more"))
        finally:
            with self.server.counting:
                self.server.busy -= 1

    def body(self) -> Any:
        if self.command != "POST":
            has_body = self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding")
            self.close_connection |= bool(has_body)  # it is not read
            return None
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            raise ApiError(411, "a Content-Length is needed")
        length = length.lstrip("0") or "0"
        if len(length) > 9 or int(length) > LARGEST_BODY:
            self.close_connection = True
            raise ApiError(413, f"the body is larger than {LARGEST_BODY} bytes")
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise Gone
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ApiError(400, "the body must be a JSON object")
        return found

    def authorize(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if self.server.key and not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
            self.close_connection = True  # its body is not read
            raise ApiError(401, "the API key is wrong or missing", code="invalid_api_key")

    def send_json(self, values: Any, status: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, error: ApiError) -> None:
        try:
            if self.streaming:  # the status was sent
                self.event(error.body())
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.send_json(error.body(), error.status)
        except OSError:
            self.close_connection = True

    def event(self, values: Any) -> None:
        data = b"data: " + (values if isinstance(values, bytes) else json.dumps(values).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def check_client(self) -> None:
        """Raise `Gone` if the client has closed the connection."""
        readable = select.poll()  # first: on a socket with a timeout, recv waits even with MSG_DONTWAIT
        readable.register(self.connection, select.POLLIN)
        if readable.poll(0) and self.connection.recv(1, socket.MSG_PEEK) == b"":
            raise Gone

    # ---- places ----------------------------------------------------------------------------------------------

    def health(self, body: Any) -> None:
        service = self.server.service
        values: dict[str, Any] = {"status": "ok", "step": service.step}
        if isinstance(service, TextService):
            values["running"], values["waiting"] = service.engine.load
            if service.engine.failure:
                values["status"] = service.engine.failure
        if self.server.draining:
            values["status"] = "shutting down"
        self.send_json(values, 200 if values["status"] == "ok" else 503)

    def card(self) -> dict[str, Any]:
        step = self.server.service.step
        return {
            "id": self.server.name, "object": "model", "created": self.server.began, "owned_by": "dtrain", "step": step
        }  # fmt: skip

    def models(self, body: Any) -> None:
        self.send_json({"object": "list", "data": [self.card()]})

    def model(self, body: Any) -> None:
        self.send_json(self.card())

    def check_model(self, body: Any) -> None:
        wanted = body.get("model")
        if wanted is not None and wanted != self.server.name:
            rule = f"model {str(wanted)[:100]!r} is not here; this server has {self.server.name!r}"
            raise ApiError(404, rule, "model", "model_not_found")

    def classify(self, body: Any) -> None:
        self.check_model(body)
        service = self.server.service
        if not isinstance(service, ClassService):
            raise ApiError(404, "this model generates text: /v1/completions", code="not_found")
        step, rows = service.classify(body.get("input"))
        data = []
        for i, row in enumerate(rows):
            best = max(range(len(row)), key=row.__getitem__)
            probabilities = dict(zip(service.labels, row, strict=True))
            data.append({"index": i, "label": service.labels[best], "probabilities": probabilities})
        self.send_json(
            {"object": "list", "model": self.server.name, "system_fingerprint": f"step-{step}", "data": data}
        )

    def text_service(self) -> TextService:
        if not isinstance(self.server.service, TextService):
            raise ApiError(404, "this model is a classifier: /v1/classify", code="not_found")
        return self.server.service

    def complete(self, body: Any) -> None:
        self.check_model(body)
        service = self.text_service()
        prompts = api.completion_prompts(body, service.encode, service.vocabulary)
        self.generate(service, api.asked(body, prompts, service.context, chat=False), chat=False)

    def chat(self, body: Any) -> None:
        self.check_model(body)
        service, messages = self.text_service(), api.messages_of(body)
        template = self.server.template
        words = template(messages) if template else api.plain_chat(messages)
        prompt = api.checked(service.encode(words), service.vocabulary, "messages")
        asked = api.asked(body, [prompt], service.context, chat=True)
        if not template:
            asked = asked._replace(stop=[*asked.stop, api.PLAIN_STOP])
        self.generate(service, asked, chat=True)

    # ---- text ------------------------------------------------------------------------------------------------

    def generate(self, service: TextService, asked: api.Asked, chat: bool) -> None:
        count = len(asked.prompts) * asked.n
        if service.engine.failure:
            raise ApiError(503, f"the model has failed: {service.engine.failure}")
        if service.engine.load[1] + count > self.server.max_waiting:
            raise ApiError(429, "too many requests are waiting", code="rate_limit_exceeded")
        events: SimpleQueue[tuple[int, Token | End]] = SimpleQueue()
        requests = [
            Request(
                asked.prompts[i // asked.n], asked.max_tokens, asked.settings, (asked.seed, i),
                asked.logprobs is not None, frozenset() if asked.ignore_eos else service.ends, events, i,
            )
            for i in range(count)
        ]  # fmt: skip
        try:
            for request in requests:
                service.engine.submit(request)
            answer = Answer(service, asked, requests, chat, self.server.name)
            if asked.stream:
                self.stream(answer, events)
            else:
                for _ in answer.pieces(self.arriving(events)):
                    pass
                self.send_json(answer.whole())
        finally:  # the client has left, or all that it wants is there
            for request in requests:
                request.cancel()

    def arriving(self, events: SimpleQueue[tuple[int, Token | End]]) -> Iterator[tuple[int, Token | End]]:
        looked = time.monotonic()
        while True:
            try:
                yield events.get(timeout=LOOK_S)
            except Empty:
                pass
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self.check_client()

    def stream(self, answer: Answer, events: SimpleQueue[tuple[int, Token | End]]) -> None:
        for piece in answer.pieces(self.arriving(events)):
            if not self.streaming:  # an error before the first token has a status of its own
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Cache-Control", "no-cache")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.streaming = True
            self.event(piece)
        if answer.asked.usage:
            self.event(answer.chunk([]) | {"usage": answer.usage()})
        self.event(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")


class Answer:
    """What has been generated so far for each choice of a request."""

    def __init__(
        self, service: TextService, asked: api.Asked, requests: list[Request], chat: bool, model: str
    ) -> None:  # fmt: skip
        self.service, self.asked, self.requests, self.chat, self.model = service, asked, requests, chat, model
        self.texts = [""] * len(requests)
        self.tokens: list[list[Token]] = [[] for _ in requests]
        self.reasons: list[str | None] = [None] * len(requests)
        self.head: dict[str, Any] = {}

    def pieces(self, events: Iterator[tuple[int, Token | End]]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream until every choice has ended."""
        streams = [TextStream(self.service.decode, self.asked.stop) for _ in self.requests]
        for i, event in events:
            if self.reasons[i]:
                continue
            if not self.head:
                self.head = self.header()
                if self.chat:
                    for k in range(len(self.requests)):
                        yield self.chunk([self.choice(k, "", role=True)])
            if isinstance(event, End):
                if event.reason not in ("stop", "length"):
                    raise ApiError(
                        503 if event.reason == "cancelled" else 500, event.error or "the server is shutting down"
                    )
                text, self.reasons[i] = streams[i].end(), "stop" if streams[i].stopped else event.reason
                new = []
            else:
                self.tokens[i].append(event)
                text, new = streams[i].add(event.id), [event]
                if streams[i].stopped:
                    self.reasons[i] = "stop"
                    self.requests[i].cancel()
            start = len(self.texts[i])
            self.texts[i] += text
            if text or (new and self.asked.logprobs is not None):
                yield self.chunk([self.choice(i, text, tokens=new, start=start)])
            if self.reasons[i]:
                yield self.chunk([self.choice(i, "", reason=self.reasons[i])])
                if all(self.reasons):
                    return

    def header(self) -> dict[str, Any]:
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return api.header(prefix, self.model, self.chat, self.asked.stream, self.requests[0].step)

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.head | {"choices": choices}

    def choice(
        self, i: int, text: str, reason: str | None = None, role: bool = False, tokens: list[Token] | None = None,
        start: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        logprobs = self.logprobs(tokens or [], start) if tokens else None
        if not self.chat:
            return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}
        delta: dict[str, Any] = (
            {"role": "assistant", "content": ""} if role else {"content": text} if not reason else {}
        )
        return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: list[Token], start: int) -> Any:
        if self.asked.logprobs is None:
            return None
        if self.chat:
            return api.chat_logprobs(tokens, self.asked.logprobs, self.service.decode)
        return api.completion_logprobs(tokens, self.asked.logprobs, self.service.decode, start)

    def usage(self) -> dict[str, int]:
        return api.usage(sum(map(len, self.asked.prompts)), sum(map(len, self.tokens)))

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for i, text in enumerate(self.texts):
            content = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            )
            logprobs = self.logprobs(self.tokens[i], 0)
            choices.append({"index": i, **content, "logprobs": logprobs, "finish_reason": self.reasons[i]})
        return self.head | {"choices": choices, "usage": self.usage()}
