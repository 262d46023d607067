"""Tokens to text as they come: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of a part of a character


class TextStream:
    """`add` returns the text that is certain after one more token, `end` the rest."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self.decode, self.stops = decode, [s for s in stops if s]
        self.tokens: list[int] = []
        self.begin = self.shown = 0  # tokens that are only context for the next ones; tokens that are text already
        self.held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        self.tokens.append(token)
        return self._next(last=False)

    def end(self) -> str:
        rest = "" if self.stopped else self._next(last=True) + self.held
        self.held = ""
        return rest

    def _next(self, last: bool) -> str:
        before = self.decode(self.tokens[self.begin : self.shown])
        text = self.decode(self.tokens[self.begin :])
        if text.endswith(UNFINISHED) and not last:
            return ""
        # some decoders treat the first token of a text differently, so one piece of text stays as context
        self.begin, self.shown = self.shown, len(self.tokens)
        return self._until_stop(text[len(before) :], last)

    def _until_stop(self, text: str, last: bool) -> str:
        self.held += text
        found = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)]
        keep = 0
        if not last:
            ends = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
            keep = max(ends, default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out
