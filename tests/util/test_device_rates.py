"""The clocks of preflight and calibrate."""

import time

import pytest
import torch

from dtrain.util import device_rates

CPU = torch.device("cpu")


def test_seconds_per_call_takes_its_budget_and_counts_calls() -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        time.sleep(0.002)

    began = time.perf_counter()
    seconds = device_rates.seconds_per_call(step, CPU, 0.1)
    took = time.perf_counter() - began
    assert len(calls) > 3 and 0.002 <= seconds <= took / len(calls) * 2


@pytest.mark.parametrize("steps", [1, 4])
def test_a_time_is_per_step(steps: int) -> None:
    for clock in (device_rates.timed, device_rates.timed_on_device):
        assert clock(lambda: time.sleep(0.01), CPU, steps) >= 0.01
    assert device_rates.best_time(lambda: time.sleep(0.01), CPU, 2, steps) >= 0.01
