"""benchmarks/peers.py: the same model for all, waves that fit the GPU, ratios to the best plain torch."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peer import chart, yardsticks
from dtrain.config.run_file import Settings
from dtrain.launch.compose import compose
from dtrain.train import build as models


@pytest.mark.parametrize(("model", "beside"), [("gpt2-tiny", 0), ("llama-tiny", 0), ("bert-tiny", 2 * 128)])
def test_the_yardstick_has_our_models_parameters(model: str, beside: int) -> None:
    """`beside`: it has no embedding of BERT's two segments, which every token would look up the same of."""
    cfg = Settings(compose([f"model={model}", "model.vocab_multiple=128"]))
    ours = sum(p.numel() for p in models.make(cfg).parameters())
    theirs = sum(p.numel() for p in yardsticks.yardstick(cfg.model).parameters())
    assert theirs == ours - beside


@pytest.mark.parametrize("case", list(peers.CASES))
def test_a_wave_fits_the_gpu_beside_plain_torch(case: str) -> None:
    large = {name for name in peers.PEERS if "does not fit" in (peers.missing(name, case) or "")}
    assert ("hf-trainer" in large, "ddp" in large) == (case == "gpt2-1.5b-32", False)
    wanted = [name for name in peers.PEERS if name not in ("plain", *large)]
    waves, peak = peers.waves(case, wanted), peers.CASES[case][2]
    assert [name for wave in waves for name in wave] == wanted
    for i, wave in enumerate(waves):
        beside = peak * (peers.IDLE if i else 1.0)  # plain torch warms up in the first wave, and waits in the others
        assert beside + sum(peak * peers.PEERS[name][4] for name in wave) <= peers.ROOM


def row(case: str, peer: str, ratio: float) -> dict[str, Any]:
    figures = {"tokens_per_s": 1000 * ratio, "mfu": 0.4 * ratio, "peak_mem_gib": 20.0, "ratio_to_reference": ratio}
    return {"case": case, "model": case, "batch": 8, "peer": peer, "name": peers.PEERS[peer][0], **figures}


def test_ratios_are_to_the_faster_plain_torch_of_the_same_model() -> None:
    rows = [row("a", "plain", 1.0), row("a", "plain-torchvision", 1.25), row("a", "ddp", 1.5), row("b", "ddp", 1.1)]
    rows.append({"case": "a", "peer": "torchtitan", "skipped": "is not installed here"})
    peers.complete(rows)
    assert [r.get("ratio_to_plain") for r in rows] == pytest.approx([0.8, 1.0, 1.2, 1.1, None])


def test_the_chart_has_every_peer_that_was_measured() -> None:
    rows = [row("a", "plain", 1.0), row("a", "ddp", 1.5), {"case": "a", "peer": "torchtitan", "skipped": "no"}]
    peers.complete(rows)
    drawn = chart.draw({"hardware": "1 × GPU", "versions": {"torch": "2.11"}, "rows": rows})
    assert drawn.count("<rect") == 1 + 2 and "dtrain ddp" in drawn and "1.50" in drawn
