"""A parameter server: every weight has one owner. Workers push gradients to the owners, and pull weights from them.

The servers are sharded over the ranks, and every rank also works. There are two ways to use them:

- All ranks meet in every step (`sum_at_owners`, `copy_from_owners`): the owner adds the gradients in the order of the
  ranks, so the sum has the same bits in every run.
- Nobody meets (`Server`, `Worker`): a thread on each rank applies each gradient as soon as it arrives, and answers with
  the newest weights. `Pieces`, on rank 0, hands out the work: a fast worker takes more of it than a slow one.

Messages are gloo's send/recv between host memories. What a rank asks of its own server is a function call.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.util.collective import wait_for_peers

TAKE, PUSH, PULL, LEAVE = range(4)  # what a worker asks of a server
REQUEST, GRADIENT, ANSWER = range(3)  # tags: gloo matches a send with the recv of the same tag
LONGEST = timedelta(days=365)  # a server may wait for its next request for as long as an evaluation takes
NOTHING = -1.0  # the answer if all pieces of a step are taken


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Give each weight, the largest first, to the rank that owns least so far."""
    owned, owner = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = owned.index(min(owned))
        owned[owner[name]] += sizes[name]
    return owner


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors as one message in host memory."""
    parts = [t.detach().reshape(-1).float() for t in tensors]
    return torch.cat(parts).cpu() if parts else torch.empty(0)


def split(message: Tensor, like: list[nn.Parameter]) -> list[Tensor]:
    parts = message.split([p.numel() for p in like])
    return [part.view(p.shape).to(p.device) for part, p in zip(parts, like, strict=True)]


def gradient_of(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


# ---- all ranks meet in every step ----------------------------------------------------------------------------


def sum_at_owners(shards: list[list[nn.Parameter]]) -> None:
    """Push: leave the sum of all ranks' gradients at the owner of each weight, and free them elsewhere."""
    rank, mine = dist.get_rank(), shards[dist.get_rank()]
    others = [r for r in range(len(shards)) if r != rank]
    own = flat(gradient_of(p) for p in mine)
    received = {r: torch.empty_like(own) for r in others}
    sent = {r: flat(gradient_of(p) for p in shards[r]) for r in others}
    wait_for_peers([dist.irecv(received[r], r) for r in others] + [dist.isend(sent[r], r) for r in others])
    total = torch.zeros_like(own)
    for r in range(len(shards)):  # in this order on every run
        total += received.get(r, own)
    for p in (p for shard in shards for p in shard):
        p.grad = None
    for p, gradient in zip(mine, split(total, mine), strict=True):
        p.grad = gradient


@torch.no_grad()
def copy_from_owners(shards: list[list[nn.Parameter]]) -> None:
    """Pull: every rank gets the owners' weights."""
    rank, mine = dist.get_rank(), flat(shards[dist.get_rank()])
    others = [r for r in range(len(shards)) if r != rank]
    received = {r: torch.empty(sum(p.numel() for p in shards[r])) for r in others}
    wait_for_peers([dist.irecv(received[r], r) for r in others] + [dist.isend(mine, r) for r in others])
    for r in others:
        for p, values in zip(shards[r], split(received[r], shards[r]), strict=True):
            p.copy_(values)


# ---- nobody meets --------------------------------------------------------------------------------------------


class Pieces:
    """Hands out the pieces of a step, each to the first worker that asks, and collects what became of them.

    With a `staleness`, a worker waits for its next piece until no gradient can become older than that: at most so many
    updates happen between the pull of a worker and its push. A piece that is in flight began after `begun` pieces were
    finished. If it is the last to finish, all other pieces that were taken until then are finished before it. So a
    piece may be taken if the pieces taken before it are at most `staleness` more than `begun` of the oldest in flight.
    """

    def __init__(self, reply: Callable[[int, float], None], staleness: int | None = None) -> None:
        self.reply, self.staleness = reply, staleness
        self.step = self.next = self.taken = self.finished = 0
        self.begun: dict[int, int] = {}  # worker → pieces that were finished when it took the one it works on
        self.waiting: list[tuple[int, int, int]] = []
        self.results: list[tuple[float, float]] = []  # loss and norm of finished pieces that were not read yet
        self.lock = threading.Lock()

    def take(self, worker: int, step: int, count: int, loss: float, norm: float) -> None:
        """A worker has finished its piece, if it had one, and asks for another of the `count` pieces of a step."""
        with self.lock:
            if self.begun.pop(worker, None) is not None:
                self.finished += 1
                self.results.append((loss, norm))
            self.waiting.append((worker, step, count))
            self.waiting = [request for request in self.waiting if not self._answered(*request)]

    def _answered(self, worker: int, step: int, count: int) -> bool:
        if step > self.step:  # who asks for a step was told that nothing is left of the one before
            self.step, self.next = step, 0
        if step < self.step or self.next == count:
            self.reply(worker, NOTHING)
        elif self.staleness is None or self.taken - min(self.begun.values(), default=self.taken) <= self.staleness:
            self.begun[worker] = self.finished
            self.reply(worker, float(self.next))
            self.next, self.taken = self.next + 1, self.taken + 1
        else:
            return False
        return True

    def new_results(self) -> list[tuple[float, float]]:
        """Return what was finished since the last call."""
        with self.lock:
            results, self.results = self.results, []
            return results


class Server:
    """Owns some weights and their optimizer state. Its thread serves the workers of the other ranks."""

    def __init__(self, weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, staleness: int | None) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.updates = 0
        self.pulled: dict[int, int] = {}  # worker → updates that were in the weights which it has
        self.staleness: Counter[int] = Counter()  # updates by the age of their gradient, in updates
        self.accepts = threading.Event()  # cleared while this rank saves: nothing may change then
        self.accepts.set()
        self.rank, self.lock = dist.get_rank(), threading.Lock()
        self.group = dist.new_group(backend="gloo", timeout=LONGEST)
        self.pieces = Pieces(self.answer, staleness) if self.rank == 0 else None
        self.own: queue.SimpleQueue[float | Exception] = queue.SimpleQueue()  # answers to this rank's own worker
        self.thread = threading.Thread(target=self._run, name="dtrain-ps", daemon=True)
        self.thread.start()

    def pull(self, worker: int) -> Tensor:
        with self.lock:
            self.pulled[worker] = self.updates
            return flat(self.weights)

    def push(self, worker: int, gradient: Tensor, lr_share: float) -> None:
        self.accepts.wait()
        with self.lock:
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_share
            for p, values in zip(self.weights, split(gradient, self.weights), strict=True):
                p.grad = values
            self.optimizer.step()
            self.staleness[self.updates - self.pulled[worker]] += 1
            self.updates += 1

    def answer(self, worker: int, value: float) -> None:
        if worker == self.rank:
            self.own.put(value)
        else:
            dist.send(torch.tensor([value], dtype=torch.float64), worker, self.group, ANSWER)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a worker is gone: this rank's own worker raises it
            self.own.put(error)

    def _serve(self) -> None:
        num_workers = dist.get_world_size() - 1
        request, gradient = torch.empty(5, dtype=torch.float64), torch.empty(sum(p.numel() for p in self.weights))
        while num_workers:
            worker = dist.recv(request, group=self.group, tag=REQUEST)  # from anyone
            kind, *values = request.tolist()
            if kind == PULL:
                dist.send(self.pull(worker), worker, self.group, ANSWER)
            elif kind == PUSH:
                dist.recv(gradient, worker, self.group, GRADIENT)
                self.push(worker, gradient, values[0])
                self.answer(worker, 1.0)
            elif kind == TAKE and self.pieces:
                step, count, loss, norm = values
                self.pieces.take(worker, int(step), int(count), loss, norm)
            elif kind == LEAVE:
                num_workers -= 1
                self.answer(worker, 1.0)


class Worker:
    """What a rank asks of the servers: its own, and those of the other ranks, which are asked at the same time."""

    def __init__(self, shards: list[list[nn.Parameter]], server: Server) -> None:
        self.shards, self.server, self.rank = shards, server, dist.get_rank()
        self.others = [r for r in range(dist.get_world_size()) if r != self.rank]
        self.taken = 0  # pieces, in all

    def take(self, step: int, count: int, loss: float = math.nan, norm: float = math.nan) -> int | None:
        """Return the next piece of a step, None if there is none. `loss`, `norm`: of the piece before."""
        if self.server.pieces:
            self.server.pieces.take(self.rank, step, count, loss, norm)
            answer = self.server.own.get()
            if isinstance(answer, Exception):
                raise answer
        else:
            box = torch.empty(1, dtype=torch.float64)
            wait_for_peers(self._ask({0: box}, TAKE, step, count, loss, norm))
            answer = float(box)
        self.taken += answer != NOTHING
        return None if answer == NOTHING else int(answer)

    @torch.no_grad()
    def pull(self) -> None:
        """Fill this rank's copy of the model with the newest weights of each server."""
        parts = {r: torch.empty(sum(p.numel() for p in self.shards[r])) for r in self.others}
        wait_for_peers(self._ask(parts, PULL))
        for r, part in {**parts, self.rank: self.server.pull(self.rank)}.items():
            for p, values in zip(self.shards[r], split(part, self.shards[r]), strict=True):
                p.copy_(values)

    def push(self, lr_share: float) -> None:
        """Send this rank's gradients; return when every server has applied its part."""
        sent = {r: flat(gradient_of(p) for p in self.shards[r]) for r in self.others}
        works = self._ask({r: torch.empty(1, dtype=torch.float64) for r in self.others}, PUSH, lr_share)
        works += [dist.isend(sent[r], r, self.server.group, GRADIENT) for r in self.others]
        self.server.push(self.rank, flat(gradient_of(p) for p in self.shards[self.rank]), lr_share)
        wait_for_peers(works)

    def leave(self) -> None:
        """At the end of a run, when no rank works any more."""
        wait_for_peers(self._ask({r: torch.empty(1, dtype=torch.float64) for r in self.others}, LEAVE))
        self.server.thread.join()

    def _ask(self, answers: dict[int, Tensor], kind: int, *values: float) -> list[Any]:
        """Begin to send a request to each of these servers, and to receive its answer.

        A send of gloo ends when the peer receives. So all of them begin at once: two ranks that each wait for the
        other's server, while that waits for them, would wait forever.
        """
        request = torch.zeros(5, dtype=torch.float64)
        request[: 1 + len(values)] = torch.tensor([kind, *values], dtype=torch.float64)
        group = self.server.group
        works = [dist.irecv(box, r, group, ANSWER) for r, box in answers.items()]
        return [*works, *(dist.isend(request, r, group, REQUEST) for r in answers)]
