"""Secrets of the environment: a canary in secret-like variables is in nothing that a run writes, prints or submits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from dtrain.cli import main
from dtrain.config.redaction import HIDDEN, check, check_arguments, hidden, hide, hide_in_code, redact, secrets
from dtrain.launch.app import Gate
from dtrain.runs.folder import read_json, write_json
from tests.world import ROOT, SMALL

CANARY = "canary/7d1f'5b9e"  # with what shells, JSON and folder names escape
NAMES = ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_CREDENTIALS")
TINY = [*SMALL, "cluster.processes=1", "train.steps=2", "data=synthetic", "data.num_samples=64"]
LAUNCH = [sys.executable, str(ROOT / "launch.py"), *TINY]
EVIL = {"_target_": "dtrain.preflight.start.local_starter", "nodes": ["here"], "tasks_per_node": 1, "env": {}}


@pytest.fixture(autouse=True)
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(NAMES):
        monkeypatch.setenv(name, f"{CANARY}{i}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_which_variables_are_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "XKB_KEYMAP", "KEYCLOAK_URL", "MONEY", "PATH_TO_TOKENIZER"):
        monkeypatch.setenv(name, "a long enough value")
    monkeypatch.setenv("SHORT_KEY", "offline")
    monkeypatch.setenv("SSH_KEY", str(tmp_path))  # where one lies
    assert {*NAMES} <= {*secrets()}
    odd = {"TOKENIZERS_PARALLELISM", "XKB_KEYMAP", "KEYCLOAK_URL", "MONEY", "PATH_TO_TOKENIZER", "SHORT_KEY", "SSH_KEY"}
    assert not odd & {*secrets()}


def test_passwords_in_addresses_are_hidden() -> None:
    text = "http://me:geheim@host:5/a?b=1&api_key=geheim2;password=geheim3 and mysql://h/db?user=me&PASSWORD=geheim4"
    assert hide(text) == (
        f"http://{HIDDEN}@host:5/a?b=1&api_key={HIDDEN};password={HIDDEN} and mysql://h/db?user=me&PASSWORD={HIDDEN}"
    )
    assert hide("https://host/a@b?page=2") == "https://host/a@b?page=2"


def test_what_looks_like_a_secret_in_code_is_hidden() -> None:
    word = "q8Zr" + "2LmX0vTn4BwY6cQ1"
    for text in (
        f"api_key = '{word}'", f'"secret": "{word}"', f"password: str = '{word}'", f"MY_KEY={word}", f"token: {word}",
        f"hf_{word}{word}", f"Bearer {word}", f"ghp_{word}{word}", f"sk-{word}", f"eyJ{word}.{word}.{word}",
        f"-----BEGIN PRIVATE KEY-----\n{word}\n-----END PRIVATE KEY-----", f"-----BEGIN RSA PRIVATE KEY-----\n{word}",
    ):  # fmt: skip
        assert word not in hide_in_code(text) and HIDDEN in hide_in_code(text), text
    for text in (
        "sort_key = 'validation_loss'", "num_tokens = 1234567890123456789", "token = tokenizer.encode_2(text)",
        "tokenizer='gpt2-medium'", "key = some_long_function_name_2", "password = getpass.getpass()",
    ):  # fmt: skip
        assert hide_in_code(text) == text


@pytest.mark.parametrize("part", ["a", "token", "token=", "token='", "eyJa-", "eyJ", "://", "?token", "sk-", "A_KEY"])
def test_code_made_to_be_slow_is_redacted_in_linear_time(part: str) -> None:
    """The test ends; in quadratic time it would take minutes."""
    hide_in_code(part * (256 * 1024 // len(part)))


def test_text_and_values_are_blacked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"a {CANARY}0 b {CANARY}1"
    assert hide(text) == "a <redacted> b <redacted>" and hide("plain") == "plain"
    assert "canary" not in hide(repr({"x": text})) and "7d1f" not in hide(__import__("json").dumps([text + "\n"]))
    monkeypatch.setenv("LONGER_TOKEN", f"{CANARY}0-and-more")  # begins with another one
    assert hide(f"{CANARY}0-and-more") == "<redacted>"
    monkeypatch.delenv("LONGER_TOKEN")
    tree = {"a": [{"b": text, text: 1}], "token": "short", "n": 3}
    assert hidden(tree) == {"a": [{"b": hide(text), hide(text): 1}], "token": "short", "n": 3}
    assert redact(tree)["token"] == "<redacted>" and CANARY not in str(redact(tree))
    write_json(tmp_path / "x.json", tree)
    assert read_json(tmp_path / "x.json") == hidden(tree)
    for node in ({"name": f"x{CANARY}0"}, {"a": {"b": ["", f"{CANARY}2"]}}, {f"{CANARY}3": 1}):
        with pytest.raises(ValueError, match=r"has the value of \$") as error:
            check(node)
        assert CANARY not in str(error.value)
    check({"a": [1, None, "x"], "b": CANARY[:8]})
    check_arguments(["name=x", "data.path=${oc.env:HOME}"])
    for word in (f"name={CANARY}0", "name=${oc.env:HF_TOKEN}", "a=${oc.decode:${oc.env:'HF_TOKEN'}}", f"{CANARY}1"):
        with pytest.raises(ValueError, match="each rank has"):
            check_arguments([word])


def everything(folder: Path) -> dict[str, bytes]:
    found = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return found | {f"name of {p}": str(p.relative_to(folder)).encode() for p in folder.rglob("*")}


def clean(folder: Path, *said: str) -> None:
    texts = everything(folder) | {f"said {i}": text.encode() for i, text in enumerate(said)}
    assert not [name for name, text in texts.items() if b"canary" in text or b"7d1f" in text]


def test_a_run_and_all_that_reads_it_leak_nothing_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One real run with the canaries in its environment; then its folder is changed as somebody else might."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    done = subprocess.run([*LAUNCH, "run_dir=run"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    longer = ["train.steps=3", "resume_allow=[train.steps]"]
    assert main(["launch", "resume=run", "dry_run=true", *longer]) == 0
    slurm = ["cluster=slurm", "cluster.gpus_per_node=0", "dry_run=true", "run_dir=new"]
    assert main(["launch", *SMALL, *slurm]) == 0
    typed: list[list[str]] = [
        ["name=${oc.env:WANDB_API_KEY}", *slurm],
        ["name=x${oc.env:${data.pattern}}", "+data.pattern=HF_TOKEN", *slurm],
        ["name=${oc.decode:'${oc.env:HF_TOKEN}'}", *slurm],
        ["run_dir=out/${oc.env:DB_PASSWORD}"],
        ["cluster.account=${oc.env:HF_TOKEN}", *slurm],
        ["resume_allow=[${oc.env:PLAIN}]", "run_dir=new", "dry_run=true"],  # known once it is composed
        ["train.steps=${oc.env:HF_TOKEN}"],
        ["-m", "train.seed=1,2", "hydra.sweep.dir=m/${oc.env:HF_TOKEN}"],
        ["logger=wandb", "logger.project=${oc.env:MY_CREDENTIALS}"],
        [f"name=\"{CANARY}0\"", *slurm],
        ["--cfg", "job", "--resolve", "name=${oc.env:WANDB_API_KEY}"],
    ]  # fmt: skip
    monkeypatch.setenv("PLAIN", f"{CANARY}1")  # a secret under a name that does not say so
    for words in typed:
        assert main(["launch", *SMALL, *words]) == 2, words
        assert "fix: " in capfd.readouterr().err, words
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere" / f"{CANARY}0"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)  # a run folder would have the secret in its path
    assert main(["launch", *SMALL, "run_dir=new", "dry_run=true"]) == 2 and "run_dir" in capfd.readouterr().err
    monkeypatch.chdir(tmp_path)
    for word in ("name", "lora.targets"):
        tree: Any = {}
        for key in reversed(word.split(".")):
            tree = {key: tree or "${oc.env:WANDB_API_KEY}"}
        Path("theirs.yaml").write_text(yaml.safe_dump(tree))
        for command in (["launch", *slurm], ["launch", "--cfg", "job", "--resolve"], ["env"], ["plan"], ["verify"]):
            assert main([*command, "recipe=theirs.yaml"]) == 2, (word, command)
            message = capfd.readouterr().err
            assert word in message and "theirs.yaml" in message and "fix: " in message, message
    for command in (["status", "run"], ["runs"], ["runs", "run"], ["evaluate", "run"], ["export", "run", "out.st"]):
        assert main(command) == 0, command

    flag = tmp_path / "flag"
    evil = EVIL | {"argv": ["touch", str(flag)], "log": str(tmp_path / "log")}
    good = yaml.safe_load((run / "config.yaml").read_text())
    Path("theirs.yaml").write_text(yaml.safe_dump({"optim": {"named_parameters": evil}}))
    refused = subprocess.run([*LAUNCH, "recipe=theirs.yaml", "run_dir=new"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "theirs.yaml: optim.named_parameters._target_" in refused.stderr, refused
    commands = [["evaluate", "run"], ["sample", "run", "x"], ["export", "run", "out.st"]]
    commands += [["launch", "resume=run", *longer], ["launch", f"init_from={run}", *SMALL, "run_dir=new"]]
    changes: list[dict[str, Any]] = [
        {"optim": good["optim"] | {"named_parameters": evil}},
        {"loss": evil},
        {"name": "${oc.env:WANDB_API_KEY}"},
    ]
    for change in changes:
        (run / "config.yaml").write_text(yaml.safe_dump(good | change))
        for command in commands:
            assert main(command) == 2, (change, command)
            message = capfd.readouterr().err
            assert str(run / "config.yaml") in message and "\n  fix: " in message, (command, message)
    named = {"model": {"_target_": "os.system", "command": f"touch {flag}"}, "trust": ["os", "subprocess"]}
    (run / "config.yaml").write_text(yaml.safe_dump(good | named))
    for command in commands[:1] + commands[3:4]:
        assert main(command) == 2
        assert "[os" not in capfd.readouterr().err, "nobody is told to trust what the folder names"
    for command in (["status", "run"], ["runs", "run"]):
        assert main(command) == 0
        out, err = capfd.readouterr()
        assert "trust" not in out + err and "resume=" in out
    # a rank of a folder that was changed after the launch
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    code = f"from pathlib import Path; from dtrain.train import loop; raise SystemExit(loop.main(Path({str(run)!r})))"
    rank = subprocess.run([sys.executable, "-c", code], env=os.environ | ranks, capture_output=True, text=True)
    assert rank.returncode == 2 and "model._target_=os.system" in rank.stderr, rank
    assert not flag.exists() and not Path("new").exists()
    Path("theirs.yaml").unlink()
    (run / "config.yaml").unlink()  # the test's own, with the names of variables in it
    out = capfd.readouterr()
    clean(tmp_path, done.stdout, done.stderr, refused.stderr, rank.stderr, out.out, out.err)


def test_a_search_that_knows_no_point_yet_refuses_a_secret_in_its_folder() -> None:
    search = OmegaConf.create({"hydra": {"sweep": {"dir": f"m/{CANARY}0"}, "sweeper": {"_target_": "a.Search"}}})
    with pytest.raises(SystemExit) as stopped:
        Gate().on_multirun_start(search)
    assert "hydra.sweep.dir" in str(stopped.value.__cause__)


def test_every_place_that_shows_or_writes_something_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each place by itself: a message of the user's own code, or of a library, may hold one."""
    import json

    from dtrain.config import run_file
    from dtrain.launch import srun
    from dtrain.loggers.tracker import RunFacts
    from dtrain.preflight import network_env
    from dtrain.ui import console

    text = f"a {CANARY}0 b"
    console.print_error(text)
    console.say(console.stdout_console(), text, (text, "red"))
    srun.say(text)
    out, err = capfd.readouterr()
    assert out.count("a <redacted> b") == 3 and err.count("a <redacted> b") == 1 and "7d1f" not in out + err
    assert network_env.quote(text) == "'a <redacted> b'"

    run_file.save(tmp_path, {"name": text, "list": [{"x": text}]})
    assert (tmp_path / "config.yaml").read_text().count("a <redacted> b") == 2

    (tmp_path / "config.yaml").write_text(json.dumps({"name": text, "api_key": "short", "choices": {"model": text}}))
    (tmp_path / "launch.json").write_text(json.dumps({"command": text}))
    (tmp_path / "summary.json").write_text(json.dumps({"status": text}))
    sent = repr(RunFacts.read(tmp_path))
    assert "7d1f" not in sent and "short" not in sent and sent.count("a <redacted> b") >= 4

    (tmp_path / "logs").mkdir()
    log = (
        "import logging, sys; from pathlib import Path; from dtrain.train import process\n"
        "process.redirect_output(Path('.'), 0)\n"
        "try: raise ValueError(sys.argv[1])\n"
        "except ValueError: logging.getLogger('mine').exception('it broke: %s', sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", log, text], cwd=tmp_path, check=True)
    written = (tmp_path / "logs" / "rank-0.log").read_text()
    assert written.count("a <redacted> b") == 2 and "7d1f" not in written, written


@pytest.mark.parametrize("secret", ['two"quotes"in-it', "a\\back\\slash", "two\nlines-of-it", "sm\u00f8rrebr\u00f8d"])
def test_a_secret_is_found_where_it_was_escaped(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    monkeypatch.setenv("ODD_TOKEN", secret)
    text = f"a {secret} b"
    assert hide(json.dumps(text)) == '"a <redacted> b"'
    assert hide(repr(text))[1:-1] == "a <redacted> b"
