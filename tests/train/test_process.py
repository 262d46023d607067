"""What surrounds the loop: votes on stopping, and the seeds of a step."""

from __future__ import annotations

import importlib
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data.arrays import Arrays
from dtrain.train import process
from tests.world import spawn

DRAWN = [0.3462744355201721, 0.5922229433084759, 0.6729415317794978]  # by torch, numpy and random


class Clock:
    """Stands for the time module, and goes on only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def steps_with_a_vote(folder: Path, step_s: list[float], stop_at: int = -1) -> tuple[list[int], int]:
    """The steps at which this rank voted, and the one after which it was told to stop (-1: none)."""
    module: Any = process
    clock = module.time = Clock()
    stop = process.StopRequest(folder)
    voted = []
    for step, seconds in enumerate(step_s):
        stop.requested = stop.requested or step == stop_at
        vote = stop.start_vote()
        if vote is not None:
            voted.append(step)
        clock.now += seconds
        if stop.read_vote(vote):
            return voted, step
    return voted, -1


def two_ranks(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    # rank 1 is asked to stop and has the longer steps: 4 of them are a tenth of a second
    times = [0.001] * 40 if rank == 0 else [0.024] * 40
    voted, stopped = steps_with_a_vote(folder, times, stop_at=-1 if rank == 0 else 7)
    assert voted == [0, 1, 5, 9], voted
    assert stopped == 9


def ranks_apart(folder: Path) -> None:
    """Under strategy=ps a rank may be some steps ahead. It need not wait for the others' votes until then."""
    rank, stop = int(os.environ["RANK"]), process.StopRequest(folder)
    stop.steps_late = 3
    for step in range(20):
        while rank == 1 and step == 0 and not (folder / "ahead").exists():
            time.sleep(0.01)
        stop.requested = rank == 1 and step == 4
        if stop.read_vote(stop.start_vote()):
            break
        if rank == 0 and step == 2:  # which has not heard of rank 1 yet
            (folder / "ahead").touch()
    assert step == 4 + 3


def test_ranks_that_are_some_steps_apart_stop_after_the_same_step(tmp_path: Path) -> None:
    spawn(2, ranks_apart, tmp_path)


def two_ranks_with_long_steps(folder: Path) -> None:
    """Rank 1 is asked during step 2: both stop after it, and not a step later."""
    rank, module = int(os.environ["RANK"]), process
    clock = module.time = Clock()  # type: ignore[assignment, attr-defined]
    for ranks_meet, last in ((True, 2), (False, 3)):
        stop = process.StopRequest(folder)
        stop.ranks_meet = ranks_meet
        for step in range(5):
            vote = stop.start_vote()
            clock.now += 2.0
            stop.requested = stop.requested or (rank == 1 and step == 2)
            if stop.read_vote(vote):
                break
        assert step == last


def test_a_stop_during_a_long_step_ends_with_it(tmp_path: Path) -> None:
    spawn(2, two_ranks_with_long_steps, tmp_path)


def one_rank(folder: Path) -> None:
    assert steps_with_a_vote(folder, [0.2] * 4)[0] == [0, 1, 2, 3], "long steps: a vote at each"
    short, _ = steps_with_a_vote(folder, [0.0001] * 50)
    assert short == [0, 1, 11, 21, 31, 41], "never more than 10 steps between two votes"
    slow, _ = steps_with_a_vote(folder, [0.01] * 8 + [0.5] * 12)
    assert slow == [0, 1, 11, 12, 13, 14, 15, 16, 17, 18, 19], "steps that become slow are voted on again"
    assert steps_with_a_vote(folder, [0.2] * 4, stop_at=2) == ([0, 1, 2], 2)
    assert steps_with_a_vote(folder, [0.001] * 40, stop_at=4) == ([0, 1], 4), "who is alone waits for no vote"
    (folder / "stop").touch()
    assert steps_with_a_vote(folder, [0.2] * 4) == ([0], 0)


def test_all_ranks_vote_at_the_same_steps_and_stop_after_the_same(tmp_path: Path) -> None:
    spawn(2, two_ranks, tmp_path)


def test_votes_come_about_ten_times_a_second(tmp_path: Path) -> None:
    spawn(1, one_rank, tmp_path)


def test_the_draws_of_a_step_are_what_they_always_were() -> None:
    """A run that an older version began must go on with the same draws."""
    before = SimpleNamespace(torch=torch.get_rng_state(), numpy=np.random.get_state(), random=random.getstate())
    try:
        process.seed_everything(3, 17, 1)
        assert [torch.rand(1).item(), np.random.rand(), random.random()] == DRAWN
    finally:
        torch.set_rng_state(before.torch)
        np.random.set_state(before.numpy)
        random.setstate(before.random)


@pytest.mark.parametrize(
    "message",
    [
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set it",
        "Dynamo failed to run it: got RuntimeError('cumsum_cuda_kernel does not have a deterministic implementation')",
        "RuntimeError: cumsum_cuda_kernel CUDA does not have a deterministic implementation",
    ],
)
def test_an_operation_without_a_deterministic_kernel_is_a_matter_of_the_setting(message: str) -> None:
    error = RuntimeError(message)
    told = process.explained(error)
    assert isinstance(told, ValueError) and told.__cause__ is error  # the line of the model is in the traceback
    assert str(told).startswith(
        "deterministic=True: cumsum_cuda_kernel has no deterministic kernel"
    ) and "\n  fix: " in str(told)
    other = RuntimeError("out of memory")
    assert process.explained(other) is other


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_gpu_convolutions_are_benchmarked_or_deterministic(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str] = []
    chosen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", groups.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}.items():
        monkeypatch.setenv(name, value)
    assert process.join_process_group(deterministic) == torch.device("cuda", 1)
    assert torch.backends.cudnn.benchmark is not deterministic and chosen == [True] * deterministic
    assert groups == ["cpu:gloo,cuda:nccl"]


def test_an_allocation_larger_than_the_machine_needs_a_smaller_model(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert "\n  fix: a smaller model or batch: this allocation alone is " in process.message(caught.value, tmp_path)
    small = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")
    assert "fix: " not in process.message(small, tmp_path), "then other processes have the memory"


def of_the_user() -> None:
    """Stands for what data= names."""


@pytest.mark.parametrize(
    ("choices", "hooks", "words"),
    [
        ({"data": f"{__name__}.of_the_user", "model": "net.Net"}, {}, [f"data={__name__}.of_the_user"]),
        ({"data": "mnist", "model": "net.Net"}, {}, ["model=net.Net"]),
        ({"data": "mnist", "model": "gpt2-tiny"}, {}, []),
        ({"data": "mnist", "hooks": "Mine"}, {"Mine": {"_target_": "net.Mine"}}, ["hooks=net.Mine"]),
    ],
)
def test_an_error_in_dtrain_names_the_object_that_it_used(
    tmp_path: Path, choices: dict[str, str], hooks: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(f"choices: {json.dumps(choices)}\nhooks: {json.dumps(hooks)}\n")
    with pytest.raises(TypeError) as caught:
        Arrays("net.points", (None,))
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this file
    found = process.objects_of(tmp_path, error)
    assert [one.partition(", ")[0] for one in found] == words
    assert all(f"test_process.py:{of_the_user.__code__.co_firstlineno}" in one for one in found if "of_the" in one)


def test_what_a_rank_says_of_a_script_that_parses_or_sets_names_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_parser.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--hidden', required=True)\nparser.parse_args([])\n"
    )
    (tmp_path / "with_names.py").write_text(
        "def net():\n    return channels\n\ndef other():\n    return width\n\n"
        'if __name__ == "__main__":\n    channels = 3\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("with_parser")
    said = process.message(ended.value, tmp_path)
    assert said.startswith("argparse: the following arguments are required: --hidden\n  fix: ")
    with_names = importlib.import_module("with_names")
    with pytest.raises(NameError) as unset:
        with_names.net()
    assert "with_names.py:8 sets it under `if __name__" in process.message(unset.value, tmp_path)
    with pytest.raises(NameError) as unknown:
        with_names.other()
    assert process.message(unknown.value, tmp_path) == "name 'width' is not defined"
