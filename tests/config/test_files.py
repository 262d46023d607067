"""Configuration as plain values: flattened, written, read back, and turned only into objects that are allowed."""

import functools
import importlib
import inspect
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dtrain.config import files
from dtrain.config.build import allowed, build, locate, untrusted
from dtrain.config.files import CONF, SECRET, flatten, read_yaml, yaml_loader
from dtrain.config.hardware import count_gpus
from dtrain.config.run_file import fingerprint, load, save
from dtrain.errors import bad
from dtrain.launch.app import slug
from dtrain.launch.compose import hydra_config
from dtrain.launch.resolve import resolve

# yaml has no control characters
texts = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
leaves = st.one_of(scalars, st.lists(scalars, max_size=3))
names = st.text("abcdefgh_", min_size=1, max_size=4).filter(lambda name: name[0] != "_")  # _x_ is reserved
trees = st.dictionaries(
    names, st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12), max_size=5
)


def compose(*overrides: str) -> dict[str, Any]:
    """What the launcher would write to config.yaml, without starting anything."""
    OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)
    return resolve(hydra_config(overrides))


# ---- flatten -------------------------------------------------------------------------------------------------


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), path, tree)[leaf] = value
    return tree


@given(trees)
def test_flatten_loses_nothing(tree: dict[str, Any]) -> None:
    flat = flatten(tree)
    assert unflatten(flat) == tree
    assert not any(isinstance(value, dict) and value for value in flat.values())


@settings(max_examples=50)
@given(trees, trees)
def test_two_trees_are_equal_exactly_when_their_flat_forms_are(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (flatten(one) == flatten(two)) == (one == two)


def test_lists_are_values_and_an_empty_section_is_kept() -> None:
    assert flatten({"a": {"b": [{"c": 1}], "d": {}}, "e": 2}) == {"a.b": [{"c": 1}], "a.d": {}, "e": 2}
    assert flatten({}) == {}


# ---- what may be built ---------------------------------------------------------------------------------------


@given(st.lists(names, max_size=3), st.lists(names, min_size=1, max_size=3))
def test_a_name_is_allowed_by_its_whole_first_parts(trust: list[str], parts: list[str]) -> None:
    target = ".".join(parts)
    starts = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    assert allowed(target, trust) == any(start in trust for start in starts)
    assert not allowed(f"dtrain.{target}", [*trust, "dtrain"]), "of dtrain's own: what conf/ names, and no more"


TORCH_FREE = [
    "cli", "config.files", "config.build", "launch.app", "launch.local", "config.mesh", "commands.runs",
    "checks.validate",
]  # fmt: skip


@pytest.mark.parametrize("module_name", TORCH_FREE)
def test_nothing_that_a_module_merely_imported_can_be_reached_through_it(module_name: str) -> None:
    module = importlib.import_module(f"dtrain.{module_name}")
    foreign = [
        name for name, value in vars(module).items()
        if getattr(inspect.getmodule(value), "__name__", "builtins").partition(".")[0] != "dtrain"
    ]  # fmt: skip
    assert len(foreign) > 5, "the test looks at something"
    for name in foreign:
        with pytest.raises(ValueError, match=r"only dtrain's own code|has no "):
            locate(f"dtrain.{module_name}.{name}")


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "builtins.eval", "eval", "", "dtrain", "dtrain.launch.local.subprocess.Popen",
        "dtrain.launch.local.os.system", "dtrain.config.files.importlib.import_module", "dtrainer.evil",
        "dtrain.nowhere.X", "dtrain.config.files.nothing", "dtrain.optim.schedule.cosine.__globals__",
    ],
)  # fmt: skip
def test_a_target_outside_is_refused_and_not_called(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"called with {command}"))
    with pytest.raises(ValueError, match="fix: ") as error:
        build({"_target_": target, "command": "true"})
    assert f"_target_={target}" in str(error.value)


def test_trust_opens_a_module_and_no_other() -> None:
    assert build({"_target_": "fractions.Fraction", "numerator": 3}, trust=["fractions"]) == 3
    with pytest.raises(ValueError, match="only dtrain's own code") as error:
        build({"_target_": "decimal.Decimal", "value": "3"}, trust=["fractions"])
    assert "decimal]" not in str(error.value), "a hint never names what is not the user's own file"
    assert build({"_target_": "fractions.Fraction", "numerator": 3}, ["fractions"], denominator=2) == 1.5


def test_a_hint_names_the_users_own_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_pqr.py").write_text("raise SystemExit('was imported')")
    monkeypatch.chdir(tmp_path)
    hint = str(untrusted("model._target_", "mine_pqr.Net", ["json"]))
    assert f"'trust=[json,mine_pqr]' if that module is yours ({tmp_path}" in hint
    for target in ("os.system", "torch.load", "nowhere_pqr.X", "yaml.load", "dtrain.config.build.build", "sys.exit"):
        assert target.partition(".")[0] + "]" not in str(untrusted("model._target_", target, []))


def test_build_binds_and_calls_as_conf_says() -> None:
    from dtrain.optim.schedule import linear

    node = OmegaConf.create({"n": 3, "s": {"_target_": "dtrain.optim.schedule.linear", "warmup_steps": "${n}"}})
    assert build(node.s)(1, 10) == linear(1, 10, 3), "bound, whether the file says so or not"
    assert build({"_target_": "dtrain.optim.schedule.linear", "_partial_": False}, steps=10)(1) == linear(1, 10)
    assert build(None) is None
    for none in ({}, {"a": 1}, [], "x", 1, {"_target_": ["os.system"]}):
        with pytest.raises(ValueError, match="must name what to build"):
            build(none)


# ---- the file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["api_key", "apikey", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db-password", "token"])
def test_secrets_are_recognised_and_never_written(key: str, tmp_path: Path) -> None:
    assert SECRET.search(key) and SECRET.search(f"deep.{key}")
    save(tmp_path, {"deep": {key: "hunter2"}, key: "hunter2", "plain": "shown"})
    text = (tmp_path / "config.yaml").read_text()
    assert "hunter2" not in text and "shown" in text and "<redacted>" in text


@pytest.mark.parametrize("key", ["data.tokenizer", "model.num_key_value_heads", "train.seed", "secretive", "passes"])
def test_what_is_no_secret_is_not_taken_for_one(key: str) -> None:
    assert not SECRET.search(key)


def test_every_setting_that_exists_is_no_secret() -> None:
    assert [key for key in files.known_settings() if SECRET.search(key)] == []


@settings(max_examples=40)
@given(trees)
def test_config_yaml_reads_back_exactly(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("run")
    tree = {k: v for k, v in tree.items() if "$" not in str(v) and "???" not in str(v)}
    save(folder, tree)
    assert load(folder) == tree
    assert [p.name for p in folder.iterdir()] == ["config.yaml"], "no temporary file is left"


def test_the_fingerprint_is_of_the_values(tmp_path: Path) -> None:
    prints = []
    for lr in (0.1, 0.1, 0.2):
        save(tmp_path, {"optim": {"lr": lr}})
        prints.append(fingerprint(tmp_path))
    assert prints[0] == prints[1] != prints[2]


def test_what_the_launcher_writes_is_complete_and_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)
    config = compose("strategy=fsdp", "model.seq_len=64")
    assert "${" not in str(config)
    assert config["data"]["seq_len"] == 64
    assert config["cluster"]["processes"] == 2
    assert config["name"] == "gpt2-tiny-fsdp"
    assert config["choices"]["strategy"] == "fsdp" and config["choices"]["recipe"] is None
    assert config["run_dir"].startswith(f"{tmp_path}/outputs/")
    assert "hydra" not in config
    assert list(tmp_path.iterdir()) == []


# ---- the machine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "visible", "want"),
    [
        (0, None, 0), (4, None, 4), (4, "", 0), (4, "-1", 0), (4, "0,2", 2), (2, "0,1,2,3", 2), (4, "GPU-abc", 1),
        (0, "0", 0),
    ],
)  # fmt: skip
def test_count_gpus(present: int, visible: str | None, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [f"nvidia{i}" for i in range(present)] + ["nvidiactl", "nvidia-uvm", "null"]
    monkeypatch.setattr(os, "listdir", lambda folder: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == want


def test_a_refusal_names_setting_value_rule_and_fix() -> None:
    assert str(bad("a.b", None, "must be 1", "a.b=1")) == "a.b=null: must be 1\n  fix: a.b=1"


# ---- yaml ----------------------------------------------------------------------------------------------------


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
