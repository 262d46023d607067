"""Completion, asked by real shells; its words must be words that the commands accept."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.commands.completion import SCRIPTS, candidates, options
from dtrain.commands.table import COMMANDS

BIN = Path(sys.executable).parent


def words(line: str) -> list[str]:
    return [word for word, _ in candidates(line.split(" ")[1:])]


def in_shell(shell: str, program: str, folder: Path) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder)}
    ran = subprocess.run([shell, "-c", program], capture_output=True, text=True, env=environment, cwd=folder)
    return [line.split("\t")[0].strip() for line in ran.stdout.splitlines()]


BASH = """eval "$(dtrain completion bash)"
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDBREAKS=' =:'; COMP_WORDS=({line}); COMP_CWORD=1
_dtrain 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}" """
ZSH = """compadd() {{ print -l -- "$@" }}; compdef() {{ : }}
eval "$(dtrain completion zsh)"; words=({line}); CURRENT=${{#words}}; _dtrain"""
FISH = """dtrain completion fish | source; complete -C '{line}'"""


@pytest.mark.parametrize(
    ("line", "wanted"), [("dtrain evalu", "evaluate"), ("dtrain launch strategy=fs", "strategy=fsdp")]
)
def test_in_the_shells(line: str, wanted: str, tmp_path: Path) -> None:
    of_bash = wanted.partition("=")[2] or wanted  # bash takes what is before = for a word of its own
    assert of_bash in in_shell("bash", BASH.format(line=line), tmp_path)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_in_other_shells(shell: str, tmp_path: Path) -> None:
    program = {"zsh": ZSH, "fish": FISH}[shell].format(line="dtrain launch strategy=fs")
    assert "strategy=fsdp" in in_shell(shell, program, tmp_path)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    assert subprocess.run([shell, "-n", str(script)], capture_output=True).stderr == b""


def test_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "2026-01-01" / "10-00-00-mine"
    run.mkdir(parents=True)
    (run / "launch.json").write_text("{}")
    assert words("dtrain ") == [*COMMANDS]
    assert "train.steps=" in words("dtrain launch train.s")
    assert words("dtrain launch strategy=ddp,fs") == ["strategy=ddp,fsdp"]
    assert words("dtrain launch train.nonfinite=") == ["train.nonfinite=stop", "train.nonfinite=skip"]
    assert "strategy.compress=int8" in words("dtrain launch strategy.compress=i")
    assert "recipe=cpu-tiny" in words("dtrain plan recipe=cpu")
    assert words("dtrain logs ") == ["latest", "outputs/2026-01-01/10-00-00-mine"]
    assert words("dtrain launch resume=o") == ["resume=outputs/2026-01-01/10-00-00-mine"]
    assert words("dtrain recipes show cpu") == ["cpu-tiny"]
    assert words("dtrain nothing ") == []


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"launch"}))
def test_the_options_are_those_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        main([command, "--help"])
    except SystemExit:
        pass
    text = capsys.readouterr().out.partition("\nexample")[0]
    shown = set(re.findall(r"^\s+(?:-\w(?: \w+)?, )?(--[a-z][a-z-]*)", text, re.MULTILINE)) | {"--help"}
    assert set(options(command)) == shown


def test_completion_imports_neither_hydra_nor_torch() -> None:
    program = (
        "import sys; from dtrain.commands.completion import candidates; list(candidates(['launch', 'strategy.']));"
        "list(candidates(['launch', 'strategy.compress='])); list(candidates(['evaluate', '--']));"
        "sys.exit(str({'hydra', 'omegaconf', 'torch', 'numpy'} & {*sys.modules} or ''))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr.strip() == ""
