"""Composing without Hydra gives what Hydra gives, or leaves it to Hydra."""

import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dtrain.config import CONF, read_yaml, yaml_loader
from dtrain.explain import GROUPS, options_of
from dtrain.plan import quick, settings

# every option of every group by itself; data with a model that has its sizes
FITTING = {"cifar10": "vit-tiny", "digits": "convnet", "images": "vit-tiny", "mnist": "convnet"}
FITTING |= {"labelled": "bert-tiny-classify", "stdlib-lines": "bert-tiny-classify"}
OPTIONS = [
    [f"{group}={option}", *([f"model={FITTING[option]}"] if group == "data" and option in FITTING else [])]
    for group in GROUPS
    for option in options_of(group)
]


def outcome(compose: Any, words: list[str]) -> Any:
    """What is composed, less the time in it, or the message about it."""
    try:
        found = compose(words)
    except settings.mistakes() as error:
        return str(error)
    return found and json.dumps({**found, "run_dir": re.sub(r"\d", "0", found["run_dir"])}, sort_keys=True, indent=1)


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_every_option_is_composed_as_hydra_does(words: list[str]) -> None:
    ours = outcome(quick.composed, words)
    assert ours is not None and ours == outcome(settings.by_hydra, words)


def test_many_at_once() -> None:
    words = ["cluster=gcp-ethernet", "model=vit-b16", "data=images", "strategy=pipeline", "optim=sgd", "profile=torch"]
    words += ["precision=bf16-pure", "logger=wandb", "schedule=linear", "hardware=h200"]
    ours = outcome(quick.composed, words)
    assert ours is not None and ours == outcome(settings.by_hydra, words)


def test_an_option_that_asks_for_another_gives_way_to_what_is_typed() -> None:
    words = ["cluster=aws-ib"]
    for typed in ([], ["hardware=a100-80gb"], ["preflight=off"], ["hardware=a100-80gb", "preflight=full"]):
        ours = outcome(quick.composed, [*words, *typed])
        assert ours is not None and ours == outcome(settings.by_hydra, [*words, *typed])


@pytest.mark.parametrize(
    "words",
    [
        ["model=llama-7b", "cluster=aws-ib", "cluster.nodes=4", "train.global_batch_size=256"],
        ["model.num_layers=2", "model.seq_len=64", "data.seq_len=32", "optim.lr=1e-3", "optim.weight_decay=0.5"],
        ["compile=none", "fused_loss=true", "train.max_grad_norm=null", "name=mine", "train.seed=-1"],
        ["strategy=3d", "strategy.tp=2", "precision=bf16", "activation_checkpointing=full", "model=vit-b16"],
        ["cluster.fabric.interface=eth0", "cluster=gcp-ethernet"],
    ],
    ids=" ".join,
)
def test_settings_are_put_where_hydra_puts_them(words: list[str]) -> None:
    ours = outcome(quick.composed, words)
    assert ours is not None and ours == outcome(settings.by_hydra, words)


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=cpu-tiny"], ["resume=latest"], ["model=gpt9"], ["model=my.Net"], ["+strategy=fsdp"], ["~optim"],
        ["train.no_such=1"], ["no_such=1"], ["train=1"], ["train.steps.more=1"], ["lora.targets=q"],
        ["cluster.sbatch.nice=1"], ["name='a b'"], ["name=a b"], ["name=${model.dim}"], ["train.seed=True"],
        ["train.seed=0x1"], ["train.seed=01"], ["train.seed=1_000"], ["optim.lr=inf"], ["optim.lr=NaN"], ["name="],
        ["train.seed=1", "train.seed=2"], ["fsdp"], ["hydra.verbose=true"], ["name=é"], ["train.seed=1,2"],
        ["data=images"], ["lora.targets=[q,v]"], ["hardware=../hardware/h100"], ["hardware=/etc/h100"], ["model=h100/"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_rest_is_left_to_hydra(words: list[str]) -> None:
    assert quick.composed(words) is None


@given(
    st.one_of(
        st.integers().map(str), st.floats().map(str), st.from_regex(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", fullmatch=True),
        st.sampled_from(["true", "True", "null", "NULL", "inf", "nan", "off", "yes", "none", "None", "e5", "-", "1e"]),
        st.text("abcXYZ019._-+", min_size=1, max_size=8),
    )
)  # fmt: skip
def test_a_value_is_read_as_hydra_reads_it(text: str) -> None:
    try:
        ours = quick.value_of(text)
    except quick.Unusual:
        return
    theirs = OverridesParser.create().parse_override(f"key={text}").value()
    assert repr(ours) == repr(theirs)


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9), st.sampled_from(["{}e{}", "{}E{}", "{}.e{}"])
)
def test_numbers_in_files_are_read_as_omegaconf_reads_them(number: float, power: int, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(f"a: {number!r}\nb: {form.format(int(number) % 100, power)}\nc: 1e5x\nd: 7\n")
        assert repr(read_yaml(path)) == repr(OmegaConf.to_container(OmegaConf.load(path)))


def test_every_file_reads_alike_with_both_readers() -> None:
    for path in itertools.chain(CONF.glob("*.yaml"), CONF.glob("*/*.yaml")):
        assert repr(read_yaml(path)) == repr(OmegaConf.to_container(OmegaConf.load(path))), path


def test_without_libyaml_it_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = {path: read_yaml(path) for path in CONF.glob("model/*.yaml")}
    yaml_loader.cache_clear()
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert {path: read_yaml(path) for path in fast} == fast
    yaml_loader.cache_clear()
