"""Continue many prompts with the decoder of the server: in the order of the prompts, by one process or several.

A prompt's tokens depend on nothing but the prompt, its number and the settings: the batch always has the same size, and
each sequence draws its own random numbers. So it does not matter which prompts were done before, or by which process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtrain.config.build import build
from dtrain.config.hardware import count_gpus
from dtrain.errors import CheckpointError, bad
from dtrain.inference import service as services
from dtrain.inference.decoder import Settings
from dtrain.inference.engine import End, Request
from dtrain.inference.export import checkpoint_of
from dtrain.inference.sample import check_generates, checked_config
from dtrain.runs.protocol import die_with_parent

AHEAD = 4  # times the slots: prompts that may be computed before the first of them has ended


class Failed(RuntimeError):
    """The model, or a process, failed while it was generating."""


class Encoded(NamedTuple):
    number: int
    text: str
    tokens: list[int]


class Task(NamedTuple):
    run_dir: Path
    step: int
    trust: list[str]
    ema: bool
    slots: int
    max_tokens: int
    settings: tuple[float, int, float]
    seed: int
    threads: int


def step_of(run_dir: Path, step: int | None) -> int:
    return step if step is not None else int(checkpoint_of(run_dir).name[5:])


def num_threads() -> int:
    """Return the threads of a process on a CPU: their number may change the last bits, so cores must not decide it."""
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 1


def environment() -> dict[str, str]:
    """What decides on the last bits of the logits."""
    if torch.cuda.is_available():
        return {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return {"torch": torch.__version__, "device": f"cpu {torch.backends.cpu.get_cpu_capability()}"}


def encode(run_dir: Path, trust: list[str], texts: Sequence[str]) -> tuple[list[list[int]], list[tuple[int, str]]]:
    """Return the tokens of each text, and (index, what is wrong) of those that the model cannot continue."""
    cfg = checked_config(run_dir, trust)
    if cfg.model.get("task") or cfg.model.get("num_classes"):
        raise bad("RUN", cfg.choices.model, "its model generates no text", "a run of gpt2 or llama")
    data = build(cfg.data, trust)
    if not hasattr(data, "encode"):
        raise bad("RUN", cfg.choices.data, "its data is no text", "a run of a language model")
    check_generates(cfg)
    longest, vocabulary = int(cfg.model.seq_len), int(cfg.model.vocab_size)
    tokens, problems = [list(data.encode(text)) for text in texts], []
    for index, found in enumerate(tokens):
        if not found:
            problems.append((index, "has a prompt without any token"))
        elif len(found) >= longest:
            problems.append((index, f"has {len(found)} tokens, and the model's seq_len of {longest} leaves no room"))
        elif max(found) >= vocabulary:
            problems.append((index, f"has token {max(found)}, and the model knows {vocabulary}"))
    return tokens, problems


def lines(task: Task, prompts: Sequence[Encoded], processes: int = 1) -> Iterator[bytes]:
    """Yield the line of each prompt, in their order."""
    if not prompts:
        return iter(())
    size = min(processes, len(prompts))
    return compute(task, prompts) if size == 1 else shared(task, prompts, size)


def compute(task: Task, prompts: Sequence[Encoded]) -> Iterator[bytes]:
    """Yield the lines of prompts that this process computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    model, cfg = services.load(task.run_dir, task.step, task.trust, None, task.ema)
    service = services.TextService(model, cfg, task.step, task.trust, task.slots, None, True, deterministic=True)
    engine = service.engine
    engine.thread.start()
    todo, running = iter(prompts), deque[tuple[Encoded, Request]]()
    try:
        while True:
            while len(running) < AHEAD * task.slots and (prompt := next(todo, None)):
                most = min(task.max_tokens, service.context - len(prompt.tokens))
                seed = (task.seed, prompt.number)
                request = Request(prompt.tokens, most, Settings(*task.settings), seed, False, service.ends)
                engine.submit(request)
                running.append((prompt, request))
            if not running:
                return
            prompt, request = running.popleft()
            made: list[int] = []
            while not isinstance(event := request.events.get()[1], End):
                made.append(event.id)
            if event.reason not in ("stop", "length"):
                raise Failed(f"the model failed ({event.error or event.reason})")
            row = {
                "index": prompt.number, "prompt": prompt.text, "text": service.decode(made), "tokens": len(made),
                "finish_reason": event.reason,
            }  # fmt: skip
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"
    finally:
        engine.close()
        torch.set_num_threads(threads)


# ---- several processes -------------------------------------------------------------------------------------------


def shared(task: Task, prompts: Sequence[Encoded], size: int) -> Iterator[bytes]:
    """Yield the lines in order. Process r computes every size-th prompt from the r-th on."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(size):
            receive, send = context.Pipe(duplex=False)
            arguments = (task, prompts[rank::size], send, gpu_of(rank), os.getpid())
            process = context.Process(target=compute_in_process, args=arguments, daemon=True)
            process.start()
            send.close()  # so that the end of the process ends the pipe
            processes.append(process)
            pipes.append(receive)
        for index in range(len(prompts)):
            rank = index % size
            try:
                kind, content = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                raise Failed(f"process {rank} ended with code {processes[rank].exitcode}") from None
            if kind == "line":
                yield content
            else:
                raise ValueError(content) if kind == "refused" else Failed(content)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def compute_in_process(task: Task, prompts: Sequence[Encoded], send: Any, gpu: str | None, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is initialized
    try:
        for line in compute(task, prompts):
            send.send(("line", line))
    except (ValueError, OSError, CheckpointError) as error:
        send.send(("refused", str(error)))
    except Failed as error:
        send.send(("failed", str(error)))


def gpu_of(rank: int) -> str | None:
    """Return the GPU of a process, as CUDA_VISIBLE_DEVICES has it; None without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(count_gpus())]
    return names[rank % len(names)] if names else None
