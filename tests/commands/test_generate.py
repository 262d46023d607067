"""`dtrain generate` on a real run: the same bytes after kills, by one process and by two."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dtrain.cli import main
from dtrain.commands.generate import open_out
from dtrain.config import run_file
from dtrain.inference.sample import generate, load_model
from dtrain.runs.folder import checkpoints
from tests.inference.test_sample import greedy
from tests.patience import until
from tests.world import make_run, train

ROOT = Path(__file__).parent.parent.parent
TEXT = [
    "model=gpt2-tiny",
    "model.vocab_size=256",
    "model.seq_len=96",
    "data=text",
    f"data.path={Path(__file__).parent}",
]
TEXT += ["data.pattern='test_generate.py'", "cluster.processes=1", "checkpoint.every=0"]
FLAGS = ["--tokens", "60", "--slots", "4"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the references, too: more threads than free cores wait for each other longer than this model computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("generate") / "writer", *TEXT, "train.steps=10")
    (run / "launch.json").write_text('{"launches": []}')
    assert train(run) == [0]
    return run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["def test"] * 2 + ["x" * (1 + 7 * i % 90) + "é…" for i in range(28)]
    path.write_text("".join(json.dumps({"prompt": t} if i % 2 else t) + "\n" for i, t in enumerate(texts)))
    return path


def command(run: Path | str, prompts: Path, out: Path, *more: str) -> list[str]:
    return ["generate", str(run), str(prompts), "-o", str(out), *FLAGS, *more]


@pytest.fixture(scope="module")
def undisturbed(run: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    assert main(command(run, prompts, out)) == 0
    return out.read_bytes()


def rows(data: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in data.splitlines()]


def test_each_prompt_has_its_line_and_its_own_seed(run: Path, prompts: Path, undisturbed: bytes) -> None:
    found = rows(undisturbed)
    given = [v if isinstance(v := json.loads(line), str) else v["prompt"] for line in prompts.read_text().splitlines()]
    assert [row["prompt"] for row in found] == given and [row["index"] for row in found] == list(range(30))
    assert found[0]["text"] != found[1]["text"], "the same prompt twice: two draws"
    room = [min(60, 96 - len(text.encode())) for text in given]
    assert all(row["tokens"] == n and row["finish_reason"] == "length" for row, n in zip(found, room, strict=True))


def test_greedy_is_what_the_plain_model_says(run: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(command(run, prompts, out, "--temperature", "0")) == 0
    model, _ = load_model(run, [])
    for row in rows(out.read_bytes())[1:4]:
        tokens = torch.tensor([list(str(row["prompt"]).encode())])
        made = generate(model, tokens, int(str(row["tokens"])), 96, greedy)[0, tokens.shape[1] :].tolist()
        assert row["text"] == bytes(min(t, 255) for t in made).decode(errors="replace")


def test_two_processes_write_what_one_writes(
    run: Path, prompts: Path, undisturbed: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(command(run, prompts, out, "--processes", "2")) == 0
    assert out.read_bytes() == undisturbed
    said = capfd.readouterr()
    assert "30 of 30 prompts" in said.err and said.out == f"wrote {out}: 30 results of step 10\n"


@pytest.mark.parametrize("kills", [2, 10])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    kills: int, run: Path, prompts: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    chance = random.Random(kills)
    kept = 0
    for number in range(kills):
        argv = command(run, prompts, out, "--processes", str(2 - number % 2))
        before = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen([sys.executable, "-m", "dtrain", *argv], cwd=ROOT, stderr=subprocess.PIPE)
        if number % 3 == 2:  # before the first result, too
            time.sleep(chance.uniform(0, 4))
        else:
            grown = lambda: (out.exists() and out.stat().st_size > before) or process.poll() is not None  # noqa: B023, E731
            until(grown, "a result")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.communicate()
        assert process.returncode == -9, "it was killed on the way"
        until(lambda: not any(map(is_alive, children)), "no process is left")  # noqa: B023
        data = out.read_bytes() if out.exists() else b""
        assert undisturbed.startswith(data) and len(data) >= kept, "each began with what was there"
        if len(data) == len(undisturbed):  # on a fast machine: the next kills come on the way again
            data = b"".join(data.splitlines(keepends=True)[:12])
            out.write_bytes(data)
        kept = len(data)
        if number % 2:  # what a kill within a write leaves
            rest = undisturbed[len(data) :].partition(b"\n")[0]
            out.write_bytes(data + rest[: chance.randint(1, len(rest))])
    assert kept > 0
    assert main(command(run, prompts, out)) == 0
    assert out.read_bytes() == undisturbed
    assert main(command(run, prompts, out)) == 0, "there is nothing to do"
    assert out.read_bytes() == undisturbed


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_damaged_line_is_computed_again(run: Path, prompts: Path, undisturbed: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(command(run, prompts, out)) == 0
    lines = undisturbed.splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:20], bytes(50) + b"\n", *lines[21:], b"more\n"]))
    assert main(command(run, prompts, out)) == 0
    assert out.read_bytes() == undisturbed


def test_it_keeps_to_its_checkpoint_and_refuses_a_mixture(
    run: Path, prompts: Path, undisturbed: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on while it is interrupted: the rest is of the checkpoint that the results were begun with."""
    out, half = tmp_path / "out.jsonl", b"".join(undisturbed.splitlines(keepends=True)[:9])
    grown = tmp_path / "grown"
    shutil.copytree(run, grown)
    assert main(command(grown, prompts, out)) == 0 and out.read_bytes() == undisturbed
    out.write_bytes(half)
    config = run_file.read_run(grown)
    config["train"]["steps"] = 12
    run_file.save(grown, config)
    assert train(grown) == [0] and next(path.name for path in checkpoints(grown / "checkpoints")) == "step-00000012"
    assert main(command(grown, prompts, out)) == 0
    assert out.read_bytes() == undisturbed, "of step 10, although there is step 12"
    capsys.readouterr()

    out.write_bytes(half)
    for argv, named in (
        (command(f"{grown}@12", prompts, out), "other checkpoint, weights"),
        (command(grown, prompts, out, "--seed", "1"), "other seed"),
    ):
        assert main(argv) == 2
        assert named in " ".join(capsys.readouterr().err.split()) and out.read_bytes() == half
    with open_out(out):
        assert main(command(grown, prompts, out)) == 2
    assert "another dtrain generate is writing it" in " ".join(capsys.readouterr().err.split())
    other = tmp_path / "mine.txt"
    other.write_text("mine")
    assert main(command(run, prompts, other)) == 2 and other.read_text() == "mine"
    assert main(command(run, prompts, prompts)) == 2


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (b'"good"\n{"prompt": 3}\n', "line 2 has no text"),
        (b'"good"\n\n"good"\n{"prompt": "x"', "line 2 is blank; line 4 is not JSON"),
        (b'"\xff"\n', "line 1 is not UTF-8"),
        (b'"\\ud800"\n', "line 1 has half a character"),
        (b'{"prompt": ""}\n', "line 1 has an empty prompt"),
        (b"", "is empty"),
        (b'"good"\n"' + 96 * b"x" + b'"\n', "line 2 has 96 tokens"),
        (b"[[]]\n" * 7, "; and 2 more lines"),
    ],
)
def test_bad_lines_are_named_before_anything_starts(
    lines: bytes, named: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(lines)
    assert main(command(run, path, out)) == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize(
    "flag", [["--tokens=0"], ["--top-p=nan"], ["--top-k=-1"], ["--temperature=inf"], ["--seed=-1"], ["--processes=0"]]
)
def test_bad_flags(flag: list[str], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("a-run-that-need-not-exist", prompts, tmp_path / "out.jsonl", *flag)) == 2
    assert flag[0].partition("=")[0] in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
