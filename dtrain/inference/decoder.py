"""The next token of many sequences at once: one step of a language model over a static KV cache.

On a GPU a step is a CUDA graph of compiled layers, one graph per batch size. Tokens, lengths and sampling settings stay
on the device, so the next step can start before the host has read the last one. On a CPU each step computes all rows,
whoever is in them: a row's numbers then do not depend on how many others there are. That they do not depend on the row
either is checked first; where they do, sequences are computed one by one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtrain.inference.choose import choose, greedy, greedy_in_parts, log_probabilities
from dtrain.inference.one_row import one_row_copy
from dtrain.inference.slots import Slots

log = logging.getLogger("dtrain")
ROWS = 32  # the rows of a step on a CPU are a multiple: then most tensors end with a whole vector register
CHUNK = 512  # tokens of a prompt in one pass: others wait for no more than that
MOST_LOGPROBS = 20
TUNED: Any = {"coordinate_descent_tuning": True}  # of torch.compile
GPU_BATCHES = (1, 8, 32, 64, 128, 256, 512)  # batch sizes with a graph of their own


class Settings(NamedTuple):
    """How a sequence's tokens are chosen."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0


class Step(NamedTuple):
    """A step that was started; `read` waits for it."""

    tokens: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    ended: torch.cuda.Event | None

    def read(self) -> list[int]:
        if self.ended is not None:
            self.ended.synchronize()
        return self.tokens.tolist()


class Graph(NamedTuple):
    """A captured step of one batch size, which chooses greedily; other choices follow from its logits."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    logits: Tensor


class Decoder:
    """`fill` a slot with a prompt, then `step` over the slots that are in use."""

    def __init__(
        self, model: nn.Module, num_slots: int, capacity: int, compiled: bool = True, fixed_batch: bool = False
    ) -> None:
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.model, self.num_slots, self.capacity = model, num_slots, capacity
        self.slots = Slots(model, num_slots, capacity)
        sizes = [b for b in GPU_BATCHES if b < num_slots] if self.on_gpu and not fixed_batch else []
        self.batches = [*sizes, num_slots]
        self.num_rows = num_slots if num_slots == 1 else -(-num_slots // ROWS) * ROWS  # of a step on a CPU
        size = (num_slots if self.on_gpu else self.num_rows) + 1
        self.last = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.temperature = torch.zeros(size, device=self.device)
        self.top_k = torch.ones(size, dtype=torch.int64, device=self.device)
        self.top_p = torch.ones(size, device=self.device)
        self.host_lengths = [0] * size  # also on a GPU, where only `fill` sets it
        self.graphs: dict[int, Graph] = {}
        self.rows: tuple[int, ...] = ()
        self.body = copy.copy(model)  # shares the weights; without the head, which a prompt does not need
        self.body.is_last = False  # type: ignore[assignment]
        self.stepper, self.greedy = model, greedy
        if compiled and self.on_gpu:
            self.stepper = compiled_copy(model)
            self.greedy = torch.compile(greedy_in_parts, dynamic=False, options=TUNED)
        self.one_row = one_row_copy(self.stepper) if compiled and self.on_gpu else None
        self.one_by_one = not self.on_gpu and not self.rows_agree()

    # ---- prompts ---------------------------------------------------------------------------------------------

    def fill(self, slot: int, tokens: Sequence[int], settings: Settings) -> Filling:
        """Begin a sequence. Its prompt is computed by `Filling.advance`, all but the last token: that is a step's."""
        assert 0 < len(tokens) <= self.capacity
        self.temperature[slot] = settings.temperature
        self.top_k[slot] = settings.top_k or 2**31
        self.top_p[slot] = settings.top_p
        return Filling(self, slot, tokens)

    # ---- steps -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, slots: Sequence[int], draws: Mapping[int, float] | None = None, logprobs: bool = False) -> Step:
        """Compute the next token of each slot, in this order. `draws`: one per slot, or None if all are greedy."""
        if not self.on_gpu:
            return self.on_cpu(slots, draws, logprobs)
        size = next(b for b in self.batches if b >= len(slots))
        graph = self.graphs.get(size) or self.capture(size)
        rows = (*slots, *[self.num_slots] * (size - len(slots)))
        if self.rows != rows:
            graph.rows.copy_(torch.tensor(rows).pin_memory(), non_blocking=True)
            self.rows = rows
        graph.graph.replay()
        if draws is not None:
            numbers = torch.tensor([draws.get(slot, 0.0) for slot in rows], dtype=torch.float32).pin_memory()
            self.last[graph.rows] = self.chosen(graph.logits, graph.rows, numbers.to(self.device, non_blocking=True))
        chosen = self.last[graph.rows]
        found = None
        if logprobs:
            found = tuple(
                x.to("cpu", non_blocking=True) for x in log_probabilities(graph.logits, chosen, MOST_LOGPROBS)
            )
        tokens = torch.empty(len(slots), dtype=torch.int64, pin_memory=True)
        tokens.copy_(chosen[: len(slots)], non_blocking=True)
        ended = torch.cuda.Event()
        ended.record()
        return Step(tokens, found, ended)  # type: ignore[arg-type]

    def on_cpu(self, slots: Sequence[int], draws: Mapping[int, float] | None, logprobs: bool) -> Step:
        """All rows, whoever is in them: row i is slot i."""
        used = torch.tensor(list(slots))
        numbers = torch.tensor([(draws or {}).get(slot, 0.0) for slot in range(self.num_rows)])
        batches = [[slot] for slot in slots] if self.one_by_one else [[*range(self.num_rows)]]
        parts = []
        for batch in batches:
            rows = torch.tensor(batch)
            active = [(i, slot, self.host_lengths[slot]) for i, slot in enumerate(batch) if slot in slots]
            logits = self.compute(rows, active)
            parts.append((greedy(logits) if draws is None else self.chosen(logits, rows, numbers[rows]), logits))
        chosen, logits = (torch.cat(each) for each in zip(*parts, strict=True))
        if not self.one_by_one:
            chosen, logits = chosen[used], logits[used]
        self.last[used] = chosen  # rows without a sequence stay as they were
        for slot in slots:
            self.host_lengths[slot] = min(self.host_lengths[slot] + 1, self.capacity - 1)
            self.lengths[slot] = self.host_lengths[slot]
        return Step(chosen, log_probabilities(logits, chosen, MOST_LOGPROBS) if logprobs else None, None)

    @torch.inference_mode()
    def rows_agree(self) -> bool:
        """Compute the same token in every row. Vectorized code may round the last elements of a tensor otherwise."""
        rows = torch.arange(self.num_rows)
        for token in (0, 1):
            self.last.fill_(token)
            logits = self.compute(rows, [(row, min(row, self.num_slots), 0) for row in rows.tolist()])
            if not torch.equal(logits, logits[:1].expand_as(logits)):
                log.warning("the rows of a batch differ in their last bits here: sequences are computed one by one")
                return False
        return True

    def compute(self, rows: Tensor, active: Sequence[tuple[int, int, int]] = ()) -> Tensor:
        """Return the logits [rows, vocabulary] after each row's last token."""
        # a sequence that has ended may be one ahead; here, not in the kernel, because positions have embeddings, too
        positions = self.lengths[rows].clamp(max=self.capacity - 1)
        self.slots.place(rows, positions, active)
        stepper = self.one_row if self.one_row is not None and len(rows) == 1 else self.stepper
        logits: Tensor = stepper(self.last[rows][:, None], cache=self.slots)[:, -1].float()
        return logits

    def chosen(self, logits: Tensor, rows: Tensor, draws: Tensor) -> Tensor:
        return choose(logits, self.temperature[rows], self.top_k[rows], self.top_p[rows], draws)

    # ---- CUDA graphs -----------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile and capture everything, so that no request waits for it."""
        if self.on_gpu:
            for size in self.batches:
                if size not in self.graphs:
                    self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> Graph:
        """Capture the step of a batch size. The padding slot is the only one that this writes to."""
        rows = torch.full((size,), self.num_slots, device=self.device)

        def step() -> Tensor:
            logits = self.compute(rows)
            self.last[rows] = self.greedy(logits)
            self.lengths[rows] += 1
            self.lengths[-1:].zero_()  # of the padding rows
            return logits

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, tunes, and lets libraries allocate their workspaces
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = step()
        self.graphs[size] = made = Graph(graph, rows, logits)
        self.rows = ()
        return made


class Filling:
    """A prompt on its way into a slot."""

    def __init__(self, decoder: Decoder, slot: int, tokens: Sequence[int]) -> None:
        self.decoder, self.slot = decoder, slot
        self.tokens = torch.tensor([list(tokens)])
        self.done = 0
        self.cache = decoder.slots.one(slot)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one more chunk; return whether the slot is ready for steps."""
        decoder, size = self.decoder, self.tokens.shape[1]
        chunk = self.tokens[:, self.done : min(self.done + CHUNK, size - 1)]
        if chunk.shape[1]:
            decoder.body(chunk.to(decoder.device), cache=self.cache)
            self.done += chunk.shape[1]
        if self.done < size - 1:
            return False
        decoder.last[self.slot] = int(self.tokens[0, -1])
        decoder.lengths[self.slot] = decoder.host_lengths[self.slot] = size - 1
        return True


def compiled_copy(model: nn.Module) -> nn.Module:
    """Return the model with compiled layers and the same weights, for steps of one token.

    Layer by layer: they share one compilation. At one row a matrix times a vector is a reduction that reaches the
    memory's bandwidth only if its block sizes are tuned.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(GPU_BATCHES))
    made = copy.copy(model)
    made._modules = dict(model._modules)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            blocks = nn.ModuleDict({key: copy.copy(block) for key, block in child.items()})
            for block in blocks.values():
                block.compile(dynamic=False, options=TUNED)
            made._modules[name] = blocks
        elif name in ("norm", "head"):
            part = copy.copy(child)
            part.compile(dynamic=False, options=TUNED)
            made._modules[name] = part
    for name in ("rotary", "embedded"):
        if hasattr(made, name):
            object.__setattr__(made, name, torch.compile(getattr(made, name), dynamic=False, options=TUNED))
    return made
