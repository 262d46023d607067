"""Names of other programs lead to a setting of ours, and what the hint tells to type is accepted."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from dtrain.checks.validate import validate
from dtrain.config.files import GROUPS, known_settings, options_of
from dtrain.config.meant_option import torch_losses
from dtrain.config.unknown_settings import accepted, unknown_setting
from dtrain.errors import ELSEWHERE, OPTIONS_ELSEWHERE, OTHERWISE
from dtrain.launch.arguments import prepare_arguments
from tests.config.test_files import compose

# A value of each setting that the launcher accepts as it is.
VALUES = {
    "train.global_batch_size": "64", "train.micro_batch_size": "4", "train.steps": "50", "train.max_grad_norm": "0.5",
    "train.epochs": "3",
    "train.loader_workers": "2", "train.eval_every": "10", "train.eval_batches": "3", "train.log_every": "5",
    "train.seed": "7", "cluster.processes": "4", "cluster.max_restarts": "1", "optim": "SGD", "optim.lr": "3e-4",
    "optim.weight_decay": "0.01", "schedule": "linear", "schedule.warmup_steps": "10", "precision": "bfloat16",
    "strategy": "fsdp", "checkpoint.every": "50", "checkpoint.keep": "2", "logger": "csv", "run_dir": "out/mine",
    "lora.rank": "4", "lora.alpha": "8", "hardware.price_per_gpu_hour": "2.5",
    "name": "first", "model.num_layers": "2", "model.num_heads": "2", "model.dim": "64", "model.seq_len": "64",
    "data": "digits", "model": "gpt2-124m", "hooks": "EarlyStopping", "loss": "cross_entropy",
    "checkpoint.keep_best": "val_loss", "checkpoint.save": "true", "train.stop_after": "9", "optim.eps": "1e-6",
    "hooks.early_stop.patience": "5",
}  # fmt: skip
OTHER_OPTIONS = ("data", "train.epochs", "loss", "optim.eps", "hooks.early_stop.patience")
# The default options do not have these settings, or their values are paths: the hint names the setting only.
WITHOUT_VALUE = {
    "cluster.partition",
    "strategy.tp",
    "strategy.pp",
    "resume",
    "init_from",
    "data.val_fraction",
    "optim.betas",
}


@pytest.fixture(autouse=True)
def without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    # many names are asked for in one process, and each time all of conf/ is read
    monkeypatch.setattr("dtrain.config.unknown_settings.known_settings", functools.cache(known_settings))
    monkeypatch.setenv("WANDB_MODE", "offline")  # no key is needed


def fix_of(message: str) -> str:
    found = re.search(r"\n  fix: (.*?)(?:   \(.*\))?$", message)
    assert found, message
    return found[1]


def test_the_hint_for_each_name_with_a_value_is_accepted() -> None:
    assert set(VALUES) | WITHOUT_VALUE == set(ELSEWHERE) and not set(VALUES) & WITHOUT_VALUE
    together: list[str] = []  # a composition takes half a second
    alone: list[str] = []
    for ours, value in VALUES.items():
        fixes = {fix_of(unknown_setting(name, value)) for name in ELSEWHERE[ours].split()}
        (fix,) = fixes
        words = fix.split()
        assert words[-1].startswith(f"{ours}=") and "…" not in fix, "every name of a setting gives the same words"
        (alone if ours in OTHER_OPTIONS else together).extend(words)
    validate(compose(*together))
    validate(compose(*alone, "model=convnet"))


def test_the_hint_for_what_is_measured_in_another_way_is_accepted() -> None:
    for fix, (names, note) in OTHERWISE.items():
        assert note and {fix_of(unknown_setting(name, "3")) for name in names.split()} == {fix}
    here = [fix for fix in OTHERWISE if " " not in fix and not fix.startswith("checkpoint.save")]
    validate(compose(*here))
    for fix in OTHERWISE.keys() - set(here):
        validate(compose(*fix.split()))


@pytest.mark.parametrize(
    ("word", "fix"), [("+lr=3", "optim.lr=…"), ("+train.batch_size=3", "train.global_batch_size=…")]
)
def test_an_added_name_gets_the_same_hint(word: str, fix: str) -> None:
    with pytest.raises(ValueError, match="there is no such setting") as refused:
        compose(word)
    assert fix_of(str(refused.value)) == fix


def test_each_name_has_one_meaning() -> None:
    known = {*known_settings(), *GROUPS}
    assert set(ELSEWHERE) <= known
    names = [
        name for theirs in (*ELSEWHERE.values(), *(names for names, _ in OTHERWISE.values())) for name in theirs.split()
    ]
    assert len(names) == len(set(names)) and not known & set(names)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("lr", "abc", "optim.lr=…"),
        ("lr", "-1", "optim.lr=…"),
        ("batch_size", "1.5", "train.global_batch_size=…"),
        ("batch_size", "0", "train.global_batch_size=…"),
        ("gpus", "all", "cluster.processes=…"),
        ("workers", "two words", "train.loader_workers=…"),
        ("optimizer", "AdamW8bit", "optim=adamw optim.state=int8"),
        ("optimizer", "Shampoo", "optim=…"),
        ("dtype", "int4", "precision=…"),
        ("train.lr", "0.1", "optim.lr=0.1"),
        ("MAX_STEPS", "9", "train.steps=9"),
    ],
)
def test_a_value_that_would_be_refused_is_not_repeated(name: str, value: str, fix: str) -> None:
    assert fix_of(unknown_setting(name, value)) == fix


def test_each_option_of_another_program_leads_to_one_of_ours() -> None:
    for group, table in OPTIONS_ELSEWHERE.items():
        names = [name for theirs in table.values() for name in theirs.split()]
        assert len(names) == len(set(names)) and not set(names) & set(options_of(group)), group
        for fix in table:
            key, _, option = fix.partition(" ")[0].partition("=")
            assert key == group
            assert option in options_of(group) or option.removeprefix("torch.nn.") in torch_losses()
    for fix in OPTIONS_ELSEWHERE["strategy"]:
        words = fix.split()
        ranks = [] if any(word.startswith("cluster.processes") for word in words) else ["cluster.processes=4"]
        validate(compose(*words, *ranks))


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("zero_stage=2", "strategy=zero2"),
        ("zero_optimization.stage=3", "strategy=zero3"),
        ("deepspeed=ds.json", "strategy=zero3 strategy.deepspeed_config=ds.json"),
        ("fp16=false", "precision=fp32"),
        ("optimizer.type=AdamW", "optim=adamw"),
        ("scheduler.type=WarmupDecayLR", "schedule=linear"),
        ("distributed_strategy=deepspeed_stage_3_offload", "strategy=zero3 strategy.offload=cpu"),
        ("callbacks=[EarlyStopping]", "hooks=early_stop"),
        ("trainer.precision=16-mixed", "precision=fp16"),
        ("trainer.strategy=DDPStrategy", "strategy=ddp"),
        ("ckpt_path=last", "resume=latest"),
        ("fsdp=full_shard", "strategy=fsdp"),
        ("fp16.enabled=true", "precision=fp16"),
        ("zero_optimization.offload_optimizer.device=cpu", "strategy=zero3 strategy.offload=cpu"),
        ("load_best_model_at_end=true", "checkpoint.keep_best=val_loss"),
        ("rank=0", "leave out rank; dtrain starts the ranks and connects them"),
    ],
)
def test_the_value_decides(typed: str, fix: str) -> None:
    name, value = typed.split("=")
    assert fix_of(unknown_setting(name, value)) == fix


@pytest.mark.parametrize("typed", ["wandb=true", "fp16=true", "bf16=1", "fsdp=True", "zero2=yes", "tensorboard=on"])
def test_an_option_that_is_switched_on_is_chosen(typed: str) -> None:
    name, value = typed.split("=")
    group, option = fix_of(unknown_setting(name, value)).split("=")
    assert option == name and option in options_of(group)
    compose(f"{group}={option}")


def test_an_option_that_is_switched_off_is_not_chosen() -> None:
    assert "logger=wandb " not in unknown_setting("wandb", "false")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--batch-size=16", "train.global_batch_size=16"),
        ("--lr", "optim.lr=…"),
        ("--max_steps=9", "train.steps=9"),
        ("--epochs=3", "train.epochs=3"),
        ("--num-workers=4", "train.loader_workers=4"),
    ],
)
def test_dashes_as_other_programs_have_them(word: str, fix: str) -> None:
    with pytest.raises(ValueError, match="there is no such setting") as refused:
        prepare_arguments([word])
    assert str(refused.value).startswith(f"{word.partition('=')[0]}: ") and fix_of(str(refused.value)) == fix


def test_accepted_values_are_typed_as_they_were() -> None:
    assert accepted("optim.lr", "3e-4") == "3e-4" and accepted("precision", "bfloat16") == "bf16"
