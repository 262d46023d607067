"""Continuous batching: requests join and leave the running batch between tokens; weights change between requests.

One thread owns the model. Each sequence draws from a generator of its own, so its tokens do not depend on when it came
or who else is there. New weights wait until the running sequences have ended, and new requests wait for them: each
response is of one checkpoint. In that time no request is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtrain.inference.decoder import Decoder, Filling, Settings, Step

log = logging.getLogger("dtrain")
GREEDY = Settings()


class Token(NamedTuple):
    """A token, with its log probability and the likeliest ones if they were asked for."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class End(NamedTuple):
    """The last that a sequence yields. reason: stop, length, cancelled or error."""

    reason: str
    error: str = ""


class Request:
    """One sequence on its way: `events` yields (index, token) for each token, then (index, End).

    events, index: several sequences may share a queue.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        settings: Settings = GREEDY,
        seed: Sequence[int] = (0,),
        logprobs: bool = False,
        ends: frozenset[int] = frozenset(),
        events: SimpleQueue[tuple[int, Token | End]] | None = None,
        index: int = 0,
    ) -> None:
        self.prompt, self.max_tokens, self.settings = prompt, max_tokens, settings
        self.logprobs, self.ends, self.index = logprobs, ends, index
        self.random = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed))))
        self.events: SimpleQueue[tuple[int, Token | End]] = events or SimpleQueue()
        self.step: int | None = None  # of the checkpoint; known from the first event on
        self.cancelled = False
        self.started = self.yielded = 0
        self.is_over = False

    def cancel(self) -> None:
        self.cancelled = True

    def over(self, end: End) -> None:
        if not self.is_over:
            self.is_over = True
            self.events.put((self.index, end))


class Engine:
    def __init__(self, decoder: Decoder, step: int | None = None) -> None:
        self.decoder, self.step = decoder, step
        self.lookahead = 1 if decoder.on_gpu else 0  # steps that run before an earlier one is read
        self.changed = threading.Condition()
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.filling: tuple[Filling, Request] | None = None
        self.free = list(range(decoder.num_slots))[::-1]
        self.new: tuple[int, Callable[[], None]] | None = None
        self.closing = False
        self.failure = ""
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def submit(self, sequence: Request) -> None:
        with self.changed:
            if self.failure:
                sequence.over(End("error", self.failure))
                return
            self.waiting.append(sequence)
            self.changed.notify()

    def swap(self, step: int, apply: Callable[[], None]) -> None:
        """Call `apply`, which copies new weights into the model, as soon as no sequence is running."""
        with self.changed:
            self.new = (step, apply)
            self.changed.notify()

    def close(self) -> None:
        """End the thread, and all sequences with it."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting sequences."""
        return len(self.running) + (self.filling is not None), len(self.waiting)

    # ---- the engine's thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        started: deque[tuple[Step, list[tuple[int, Request]]]] = deque()
        reason = End("cancelled")
        try:
            while True:
                with self.changed:
                    while not (self.closing or self.waiting or self.running or self.filling or started or self.new):
                        self.changed.wait()
                    if self.closing:
                        return
                    self.admit()
                if self.filling and self.filling[0].advance():
                    self.running[self.filling[0].slot] = self.filling[1]
                    self.filling = None
                batch = [(slot, s) for slot, s in self.running.items() if s.started < s.max_tokens and not s.cancelled]
                if batch:
                    started.append((self.start(batch), batch))
                while started and (len(started) > self.lookahead or not batch):
                    self.collect(*started.popleft())
                for slot, s in list(self.running.items()):
                    if s.cancelled or s.is_over:
                        s.over(End("cancelled"))
                        del self.running[slot]
                        self.free.append(slot)
        except Exception as error:
            log.exception("the model failed")
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            reason = End("error", self.failure)
        finally:
            with self.changed:
                self.failure = self.failure or "the server is shutting down"
                for s in (*self.running.values(), *self.waiting, *([self.filling[1]] if self.filling else [])):
                    s.over(reason)
                self.running.clear()
                self.waiting.clear()
                self.filling = None

    def admit(self) -> None:
        """Give the next request a slot; or, when all have ended, change the weights."""
        if self.filling and self.filling[1].cancelled:
            self.filling[1].over(End("cancelled"))
            self.free.append(self.filling[0].slot)
            self.filling = None
        for s in [s for s in self.waiting if s.cancelled]:
            self.waiting.remove(s)
            s.over(End("cancelled"))
        if self.new:
            if self.running or self.filling:
                return  # those that run keep their weights; the others wait for the new ones
            self.step, apply = self.new
            self.new = None
            apply()
        if self.waiting and self.free and not self.filling:
            s = self.waiting.popleft()
            s.step = self.step
            self.filling = (self.decoder.fill(self.free.pop(), s.prompt, s.settings), s)

    def start(self, batch: list[tuple[int, Request]]) -> Step:
        draws = None
        if any(s.settings.temperature > 0 for _, s in batch):
            draws = {slot: s.random.random() if s.settings.temperature > 0 else 0.0 for slot, s in batch}
        for _, s in batch:
            s.started += 1
        return self.decoder.step([slot for slot, _ in batch], draws, any(s.logprobs for _, s in batch))

    def collect(self, step: Step, batch: list[tuple[int, Request]]) -> None:
        tokens = step.read()
        logs: list[Any] = [x.tolist() for x in step.logprobs] if step.logprobs else []
        for i, ((_, s), token) in enumerate(zip(batch, tokens, strict=True)):
            if s.is_over:  # it has ended while this step was running
                continue
            if token in s.ends:
                s.over(End("stop"))
                continue
            s.yielded += 1
            if s.logprobs:
                likeliest = tuple(zip(logs[2][i], logs[1][i], strict=True))
                s.events.put((s.index, Token(token, logs[0][i], likeliest)))
            else:
                s.events.put((s.index, Token(token)))
            if s.yielded == s.max_tokens:
                s.over(End("length"))


def copy_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Overwrite a model's weights in place: captured graphs know them by their addresses."""
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])
