"""Requests and responses in the form of OpenAI's API, without any networking."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from dtrain.inference.decoder import MOST_LOGPROBS, Settings

MOST_CHOICES = 16
MOST_STOPS = 16
# what we do not do: the values that mean "not asked for"
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}), "frequency_penalty": (None, 0), "presence_penalty": (None, 0),
    "logit_bias": (None, {}), "echo": (None, False), "suffix": (None, ""), "audio": (None,), "prediction": (None,),
    "modalities": (None, ["text"]), "reasoning_effort": (None,), "best_of": (None, 1),
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant")


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Asked(NamedTuple):
    """A checked request for text."""

    prompts: list[list[int]]
    max_tokens: int
    settings: Settings
    seed: int
    n: int
    stop: list[str]
    stream: bool
    usage: bool  # a last event with the counts
    logprobs: int | None  # how many of the likeliest tokens beside the chosen one
    ignore_eos: bool


def read(body: Any, key: str, kinds: tuple[type, ...], default: Any, least: float, most: float) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if type(value) not in kinds or not least <= value <= most:  # NaN is in no range
        what = "a whole number" if float not in kinds else "a number"
        limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise ApiError(400, f"{key} must be {what} {limit}", key)
    return value


def flag(body: Any, key: str) -> bool:
    value = body.get(key)
    if value is not None and type(value) is not bool:
        raise ApiError(400, f"{key} must be true or false", key)
    return bool(value)


def asked(body: Mapping[str, Any], prompts: list[list[int]], context: int, chat: bool) -> Asked:
    """Check everything but the prompt, whose tokens are there already."""
    for key, unused in REFUSED.items():
        if key in body and body[key] not in unused:
            raise ApiError(400, f"{key} is not supported by this server", key, "unsupported_parameter")
    longest = max(map(len, prompts))
    room = context - longest
    if room < 1:
        rule = f"the prompt has {longest} tokens; this model's context has {context}"
        raise ApiError(400, rule, "messages" if chat else "prompt", "context_length_exceeded")
    key = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    count = read(body, key, (int,), room if chat else min(16, room), 1, math.inf)
    if count > room:
        rule = f"the prompt has {longest} tokens, and with {count} more they exceed the context of {context}"
        raise ApiError(400, rule, key, "context_length_exceeded")
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MOST_STOPS or not all(isinstance(s, str) and s for s in stop):
        raise ApiError(400, f"stop must be a text, or a list of at most {MOST_STOPS} texts, none empty", "stop")
    if chat:
        wanted = read(body, "top_logprobs", (int,), 0, 0, MOST_LOGPROBS) if flag(body, "logprobs") else None
    else:
        wanted = read(body, "logprobs", (int,), None, 0, MOST_LOGPROBS)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", "stream_options")
    return Asked(
        prompts, count,
        Settings(
            float(read(body, "temperature", (int, float), 1.0, 0, 2)), read(body, "top_k", (int,), 0, 0, 2**31),
            float(read(body, "top_p", (int, float), 1.0, 0, 1)),
        ),
        read(body, "seed", (int,), secrets.randbits(62), -(2**63), 2**64) % 2**64,
        read(body, "n", (int,), 1, 1, MOST_CHOICES), stop, flag(body, "stream"), flag(options, "include_usage"), wanted,
        flag(body, "ignore_eos"),
    )  # fmt: skip


# ---- prompts -------------------------------------------------------------------------------------------------


def completion_prompts(body: Mapping[str, Any], encode: Callable[[str], list[int]], vocabulary: int) -> list[list[int]]:
    """Return the tokens of each prompt: a text, texts, tokens, or lists of tokens."""
    given = body.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(t) is int for t in given)):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_CHOICES:
        raise ApiError(400, f"prompt must be a text, a list of tokens, or a list of at most {MOST_CHOICES}", "prompt")
    return [checked(encode(text(p)) if isinstance(p, str) else p, vocabulary, "prompt") for p in given]


def text(value: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ApiError(400, "the text has a lone surrogate, which is not a character")
    return value


def checked(tokens: Any, vocabulary: int, param: str) -> list[int]:
    if not isinstance(tokens, list) or not tokens:
        raise ApiError(400, f"{param} has no tokens", param)
    if not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
        raise ApiError(400, f"{param} has tokens that the model does not have: it has {vocabulary}", param)
    return tokens


def messages_of(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a chat as role and content; refuse what is not text."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list with at least one message", "messages")
    found = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(400, f"{where} must have a role: {', '.join(ROLES)}", where)
        content = message.get("content")
        if isinstance(content, list):
            others = [p.get("type") if isinstance(p, dict) else p for p in content]
            if any(kind != "text" for kind in others) or not all(isinstance(p.get("text"), str) for p in content):
                rule = f"{where} has parts that are not text; this server reads no images, sounds or files"
                raise ApiError(400, rule, where, "unsupported_content")
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str):
            raise ApiError(400, f"{where} must have a content that is text", where)
        found.append({"role": message["role"], "content": text(content)})
    return found


def plain_chat(messages: Iterable[Mapping[str, str]]) -> str:
    """The template without a template: `User: …`, `Assistant: …`, an empty line between them."""
    names = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
    return "".join(f"{names[m['role']]}: {m['content']}\n\n" for m in messages) + "Assistant:"


PLAIN_STOP = "\n\nUser:"  # where the next turn begins


# ---- responses -----------------------------------------------------------------------------------------------


def header(kind: str, model: str, chat: bool, chunk: bool, step: int | None) -> dict[str, Any]:
    name = "chat.completion" if chat else "text_completion"
    return {
        "id": kind + secrets.token_hex(12), "object": name + (".chunk" if chunk and chat else ""),
        "created": int(time.time()), "model": model, "system_fingerprint": None if step is None else f"step-{step}",
    }  # fmt: skip


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_logprobs(tokens: list[Any], count: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        shown = decode([token])
        return {"token": shown, "logprob": logprob, "bytes": list(shown.encode("utf-8", "replace"))}

    rows = [one(t.id, t.logprob) | {"top_logprobs": [one(*pair) for pair in t.likeliest[:count]]} for t in tokens]
    return {"content": rows, "refusal": None}


def completion_logprobs(tokens: list[Any], count: int, decode: Callable[[list[int]], str], start: int) -> Any:
    shown, offsets = [decode([t.id]) for t in tokens], []
    for piece in shown:
        offsets.append(start)
        start += len(piece)
    top = [{decode([i]): logprob for i, logprob in t.likeliest[:count]} for t in tokens]
    values = [t.logprob for t in tokens]
    return {"tokens": shown, "token_logprobs": values, "top_logprobs": top if count else None, "text_offset": offsets}
