"""What `prepare_arguments` makes of each short form, and what it leaves as typed."""

from __future__ import annotations

import pytest

from dtrain.launch.arguments import prepare_arguments

NAMED = "hydra.job.config.override_dirname.exclude_keys="


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        (["--dry-run"], ["dry_run=true"]),
        (["+strategy=fsdp", "++model=gpt2-124m"], ["strategy=fsdp", "model=gpt2-124m"]),
        (["+recipe=cpu-tiny"], ["recipe=cpu-tiny"]),
        (["recipe=null", "train.steps=3"], ["train.steps=3"]),
        (["run_dir=~/x", "data.path=~", "name=a~b"], ["run_dir=/home/me/x", "data.path=/home/me", "name=a~b"]),
        (
            ["strategy=ddp,fsdp", "-m", "+train.foo=1"],
            ["-m", "strategy=ddp,fsdp", "+train.foo=1", f"{NAMED}[train.foo,trust]"],
        ),
        (["--cfg", "job", "-p", "train", "--info", "--help"], ["--cfg", "job", "-p", "train", "--info", "--help"]),
        (["resume=null"], ["resume=null"]),
    ],
)
def test_arguments(typed: list[str], want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert prepare_arguments(typed) == want
