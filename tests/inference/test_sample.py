"""What comes out of a run: text, and one file of weights that needs no dtrain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import Drawn
from dtrain.cli import main
from dtrain.config.run_file import Settings
from dtrain.inference.sample import check_generates, generate, pick, sample
from dtrain.models.gpt2 import GPT2
from dtrain.models.layers import Cache
from dtrain.models.llama import Llama
from dtrain.strategies.materialize import init_weights
from tests.world import make_run, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(
        tmp_path_factory.mktemp("sample"),
        "strategy=fsdp",
        "cluster.processes=2",
        "model.vocab_size=256",
        "data=text",
        f"data.path={Path(__file__).parent}",
        "data.pattern='**/*.py'",
        "train.steps=30",
    )
    assert train(folder, 2) == [0, 0]
    (folder / "launch.json").write_text('{"launches": []}')
    return folder


def test_sample_goes_on_with_the_prompt_and_is_repeatable(run: Path) -> None:
    first = sample(run, "def test", 30, 0.8, 50, seed=1)
    assert first.startswith("def test") and len(first) > len("def test")
    assert first == sample(run, "def test", 30, 0.8, 50, seed=1)
    assert first != sample(run, "def test", 30, 0.8, 50, seed=2)


def test_pick_keeps_to_the_top_k() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 10.0, 2, generator).item() for _ in range(100)} == {1, 2}
    assert {pick(logits, 10.0, 0, generator).item() for _ in range(200)} == {0, 1, 2, 3}
    assert pick(logits, 0, 0, generator).item() == 1


# ---- the cache -----------------------------------------------------------------------------------------------


def language_model(name: str, seq_len: int) -> nn.Module:
    if name == "gpt2":
        model: nn.Module = GPT2(2, 32, 4, vocab_size=50, seq_len=seq_len, vocab_multiple=16)
    else:
        model = Llama(2, 32, 4, 2, 48, vocab_size=50, seq_len=seq_len, vocab_multiple=16)
    init_weights(model, Drawn(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # else the likeliest token is soon always the same one
    return model.eval()


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1, keepdim=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_tokens_piece_by_piece_have_the_logits_of_the_whole(name: str, pieces: list[int], seed: int) -> None:
    model, cache = language_model(name, 45), Cache(45)
    tokens = torch.randint(0, 50, (2, sum(pieces)), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = torch.cat([model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-5)
    assert cache.length == sum(pieces)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("prompt", [1, 11, 16, 40])
def test_greedy_text_is_the_same_with_and_without_a_cache(name: str, prompt: int) -> None:
    """Also when the text is longer than the model's 16 tokens, several times over."""
    model = language_model(name, 16)
    tokens = torch.randint(0, 50, (2, prompt), generator=torch.Generator().manual_seed(prompt))
    cached = generate(model, tokens, 40, 16, greedy)
    assert cached.shape == (2, prompt + 40) and torch.equal(cached[:, :prompt], tokens)
    assert torch.equal(cached, generate(model, tokens, 40, 16, greedy, cached=False))
    assert cached[0, prompt:].unique().numel() > 5, "or it would be no test"


def test_a_full_window_goes_on_from_its_last_half() -> None:
    """How many tokens each pass computes, and how many it sees."""
    seen: list[tuple[int, int]] = []

    class Watched(nn.Module):
        def forward(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.length += tokens.shape[1]
            seen.append((tokens.shape[1], cache.length))
            return torch.zeros(*tokens.shape, 4)

    generate(Watched(), torch.zeros(1, 3, dtype=torch.int64), 8, 6, greedy)
    assert seen == [(3, 3), (1, 4), (1, 5), (1, 6), (3, 3), (1, 4), (1, 5), (1, 6)]


def test_a_model_without_a_cache_writes_too() -> None:
    class Next(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((tokens + 1) % 5, 5).float()

    assert generate(Next(), torch.tensor([[3]]), 6, 4, greedy).tolist() == [[3, 4, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "0"], ["--tokens", "-3"], ["--temperature", "-1"], ["--temperature", "nan"],
        ["--temperature", "inf"], ["--top-k", "-1"], ["--seed", "-1"], ["--seed", str(2**63)],
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flag, value = options
    assert main(["sample", "a-run-that-need-not-exist", "x", f"{flag}={value}"]) == 2
    error = capsys.readouterr().err
    assert f"{flag}={float(value) if flag == '--temperature' else value}: must be" in error and f"fix: {flag} " in error


@pytest.mark.parametrize("options", [["--tokens=many"], ["--temperature=hot"], ["--top-k=1.5"]])
def test_what_is_no_number_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "a-run", "x", *options]) == 2
    error = capsys.readouterr().err
    assert f"{options[0]}: must be a " in error and f"fix: {options[0].partition('=')[0]} " in error


def test_a_tiny_temperature_is_the_likeliest() -> None:
    logits, generator = torch.tensor([[50.0, 60.0, -90.0]]), torch.Generator().manual_seed(0)
    assert {pick(logits, t, 0, generator).item() for t in (1e-300, 1e-38, 1e-6, 1e-3) for _ in range(5)} == {1}


def test_a_run_of_something_else_writes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["trust=[tests]", "data._target_=tests.models.packed.Packed", "train.steps=1", "cluster.processes=1"]
    folder = make_run(tmp_path / "run", *data)
    assert train(folder) == [0]
    (folder / "launch.json").write_text('{"launches": []}')
    assert main(["sample", str(folder), "x", "--trust", "tests"]) == 2
    assert "is not text, so the model cannot generate text" in capsys.readouterr().err


def test_export_loads_without_dtrain(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out" / "model.safetensors"
    assert main(["export", str(run), str(target)]) == 0
    expected = dict(store.weights(run / "checkpoints" / "step-00000030"))
    loaded = load_file(target)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[k], v) for k, v in expected.items())
    script = f"import sys, safetensors.torch as s; s.load_file({str(target)!r}); assert 'dtrain' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "fresh")
    (folder / "launch.json").write_text('{"launches": []}')
    assert main(["sample", str(folder), "x"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_a_model_of_the_user_generates_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"model=hf:mine: dtrain generates text .*\n  fix: dtrain export "):
        check_generates(Settings({"model": {"folder": "mine"}, "choices": {"model": "hf:mine"}}))
