"""The rules: every option that exists keeps them, and what breaks one is refused with a way out that works."""

import ast
import copy
import importlib
import inspect
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dtrain.checks import validate
from dtrain.checks.resume import FREE_ON_RESUME, changes_shapes, check_resume
from dtrain.checks.validate import LINEAR_LAYERS
from dtrain.config import files
from dtrain.config.build import build
from dtrain.config.files import CONF, RECIPES, flatten, options_of
from dtrain.config.mesh import MeshSizes, batch_sizes
from dtrain.config.ranges import AT_LEAST, AT_MOST, LESS_THAN, MORE_THAN
from dtrain.config.schema import REQUIRED, check_group, check_section, fits, signature
from dtrain.data.tokens import prepare
from dtrain.errors import unknown
from dtrain.launch import recipes
from tests.config.test_files import compose

OPTIONS = sorted(CONF.glob("*/*.yaml"))
IDS = [f"{path.parent.name}={path.stem}" for path in OPTIONS]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dtrain.config.hardware.count_gpus", lambda: 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("base"))
        return compose("cluster.processes=2")


def changed(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A copy with other values; double underscores stand for dots."""
    config = copy.deepcopy(config)
    for key, value in settings.items():
        *path, leaf = key.split("__")
        node = config
        for name in path:
            node = node[name]
        node[leaf] = value
    return config


def with_key(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return changed(config, **{key.replace(".", "__"): value})


def message(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="\n  fix: ") as error:
        validate.validate(config)
    return str(error.value)


# ---- every option that exists --------------------------------------------------------------------------------


def needed(path: Path, tmp_path: Path) -> list[str]:
    """What an option cannot do without: the data path that only a user knows."""
    section = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(section, dict)
    if path.parent.name == "precision" and path.stem == "fp8":
        pytest.skip("needs torchao and a GPU: tests/optim/test_precision.py")
    models = {"digits": "convnet", "mnist": "convnet", "cifar10": "convnet", "images": "convnet"}
    models |= {"mlm": "bert-tiny", "stdlib-mlm": "bert-tiny"}
    models |= dict.fromkeys(["labelled", "stdlib-lines"], "bert-tiny-classify")
    if path.stem == "hf":
        pytest.skip("needs a folder with a model: tests/models/test_hugging_face.py")
    model = [f"model={models[path.stem]}"] if path.parent.name == "data" and path.stem in models else []
    keyless = ["logger.wandb.mode=offline"] if path.stem == "wandb" else []
    return [*model, *keyless, *data_path(path, section, tmp_path)]


def data_path(path: Path, section: dict[Any, Any], tmp_path: Path) -> list[str]:
    if section.get("path") != "???":
        return []
    if path.stem == "labelled":
        rows = [json.dumps({"text": f"text {i}", "label": "ab"[i % 2]}) for i in range(40)]
        (tmp_path / "texts.jsonl").write_text("\n".join(rows))
        return [f"data.path={tmp_path / 'texts.jsonl'}"]
    if path.stem in ("mnist", "cifar10", "images"):  # their own tests have whole ones
        pytest.skip("needs files of its own: tests/data")
    (tmp_path / "text.txt").write_text("words and words\n" * 40)
    if path.stem == "tokens":
        prepare(tmp_path / "text.txt", tmp_path / "tokens")
        return [f"data.path={tmp_path / 'tokens'}"]
    return [f"data.path={tmp_path / 'text.txt'}"]


@pytest.mark.parametrize("path", OPTIONS, ids=IDS)
def test_every_option_composes_and_validates(path: Path, tmp_path: Path) -> None:
    if path.stem == "horovod" and not find_spec("horovod"):
        pytest.skip("Horovod is not built: make horovod")
    ranks = ["cluster.processes=4"] if path.parent.name == "strategy" else []  # enough for 3d
    config = compose(*needed(path, tmp_path), f"{path.parent.name}={path.stem}", *ranks)
    assert config["choices"][path.parent.name] == path.stem
    written = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(written, dict)
    section = set(config[path.parent.name])
    if path.parent.name == "logger":  # each in a section of its own, because several may be chosen
        section = set(config["logger"].get(path.stem, {}))
    if path.parent.name == "hooks":
        section = set(config["hooks"].get(path.stem, {}))
    own = set(written) - {"defaults"}
    assert section >= own if "defaults" in written else section == own, "the section is the file's"


@pytest.mark.parametrize("path", OPTIONS, ids=IDS)
def test_a_typo_in_any_option_is_found(path: Path) -> None:
    """So no option's constructor swallows what it does not know, and the signature reader reads them all."""
    section = files.section(path.parent.name, path.stem)
    group = path.parent.name
    prefix = files.setting_prefix(group, path.stem) if section else group
    with pytest.raises(ValueError, match=rf"{prefix}\.zzz: there is no such setting"):
        if section:
            check_section(prefix, {"zzz": 1} | section, [])
        else:  # logger=none
            check_group(group, {group: {"zzz": 1}}, [])


TRAINING = [path for path in sorted(RECIPES.glob("*.yaml")) if "\nscript:" not in path.read_text()]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_recipe_validates(path: Path) -> None:
    recipes.store_recipes()
    assert compose(f"recipe={path.stem}")["choices"]["recipe"] == path.stem


# ---- the signature reader ------------------------------------------------------------------------------------

TORCH_FREE = [
    "dtrain.optim.schedule.constant", "dtrain.optim.schedule.linear", "dtrain.optim.schedule.cosine",
    "dtrain.launch.local.Local",
    "dtrain.loggers.wandb.Wandb", "dtrain.loggers.mlflow.Mlflow", "dtrain.data.text.Text", "dtrain.data.tokens.Tokens",
    "dtrain.data.stdlib.Stdlib", "dtrain.data.synthetic.Synthetic",
]  # fmt: skip


@pytest.mark.parametrize("target", TORCH_FREE)
def test_the_signature_read_from_source_is_the_real_one(target: str) -> None:
    module_name, _, name = target.rpartition(".")
    real = inspect.signature(getattr(importlib.import_module(module_name), name)).parameters
    read = signature(target, "x")
    assert read is not None
    assert list(read) == list(real)
    for parameter, (annotation, default) in read.items():
        assert annotation == real[parameter].annotation
        if default is REQUIRED:
            assert real[parameter].default is inspect.Parameter.empty
        else:
            assert ast.literal_eval(default) == real[parameter].default


def test_the_signature_reader_reads_awkward_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_xyz.py").write_text(
        "import nothing_that_exists\n"
        "from dtrain.loggers.wandb import Wandb as W\n"
        "from subprocess import Popen\n"
        "class Plain: pass\n"
        "class Base:\n    def __init__(self, a): ...\n"
        "class Child(Base): pass\n"
        "def keyword(a, /, b: int = 1, *, c: str, d=None): ...\n"
        "def swallow(**rest): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    trust = ["mine_xyz"]
    assert signature("mine_xyz.Plain", "x", trust) == {}
    assert signature("mine_xyz.Child", "x", trust) is None, "its base decides, at run time"
    assert signature("mine_xyz.swallow", "x", trust) is None
    assert signature("mine_xyz.keyword", "x", trust) == {
        "a": ("", REQUIRED), "b": ("int", "1"), "c": ("str", REQUIRED), "d": ("", "None")
    }  # fmt: skip
    assert signature("mine_xyz.W", "x", trust) == signature("dtrain.loggers.wandb.Wandb", "x")
    for target in ("mine_xyz.Popen", "mine_xyz.nothing_that_exists", "mine_xyz.nope", "mine_xyz", "mine_abc.X"):
        with pytest.raises(ValueError, match=rf"model(\._target_)?=(subprocess|{target.partition('.')[0]}).*\n  fix: "):
            signature(target, "model._target_", trust)
    with pytest.raises(ValueError, match=r"trust=\[mine_xyz\]"):
        signature("mine_xyz.Plain", "model._target_", [])


values = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), st.text("abc", max_size=2),
    st.lists(st.one_of(st.integers(), st.floats(0, 1), st.booleans(), st.text("ab", max_size=1)), max_size=3),
)  # fmt: skip


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ORACLE: dict[str, Any] = {
    "int": lambda v: is_number(v) and not isinstance(v, float),
    "float": is_number,
    "bool": lambda v: v is True or v is False,
    "str": lambda v: isinstance(v, str),
    "int | None": lambda v: v is None or (is_number(v) and not isinstance(v, float)),
    "list[float]": lambda v: isinstance(v, list) and all(map(is_number, v)),
    "list[str]": lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
    "Literal['a', 'b']": lambda v: isinstance(v, str) and v in ("a", "b"),
    "Literal['a']": lambda v: isinstance(v, str) and v == "a",
    "Anything[at, all]": lambda v: True,
}


@given(values, st.sampled_from(sorted(ORACLE)))
def test_fits(value: Any, annotation: str) -> None:
    assert fits(value, ast.parse(annotation, mode="eval").body) == ORACLE[annotation](value)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("train.steps", 1000.0, "train.steps=1000"),
        ("train.steps", "10", "train.steps=10"),
        ("train.steps", 1.5, "train.steps=1"),
        ("train.steps", "100k", "train.steps=100000"),
        ("train.steps", 0.001, "train.steps=300"),
        ("train.steps", True, "train.steps=300"),
        ("train.micro_batch_size", "x", "train.micro_batch_size=null"),
        ("compile", "maybe", "compile=auto"),
        ("trust", "mine", "'trust=[mine]'"),
        ("name", 5, "'name=\"5\"'"),
        ("model.dim", "x", "model.dim=1"),
        ("optim.lr", "x", "optim.lr=0.001"),
        ("optim.betas", 0.9, "'optim.betas=[0.9,0.95]'"),
        ("optim.lr_scaling", "linaer", "optim.lr_scaling=linear"),
        ("optim.lr_scaling", "zzz", "optim.lr_scaling=none"),
        ("cluster.grace_s", "soon", "cluster.grace_s=300"),
        ("activation_checkpointing", True, "activation_checkpointing=ops or selective or full"),
        ("activation_checkpointing", "ful", "activation_checkpointing=full"),
    ],
)
def test_a_wrong_type_gets_what_was_probably_meant(base: dict[str, Any], key: str, value: Any, fix: str) -> None:
    text = message(with_key(base, key, value))
    assert text.startswith(f"{key}={value}: must be ")
    assert text.endswith(f"\n  fix: {fix}")


# ---- ranges --------------------------------------------------------------------------------------------------


def present(base: dict[str, Any], keys: Any) -> list[str]:
    return [key for key in keys if key in flatten(base)]


def test_each_limit_holds_exactly(base: dict[str, Any]) -> None:
    """The limit itself is accepted or refused as the rule says, and the proposed value is accepted."""
    flat = flatten(base)
    assert len(present(base, AT_LEAST)) > 20, "the test looks at something"
    for key in present(base, AT_LEAST):
        below = flat | {key: AT_LEAST[key] - 1}
        with pytest.raises(ValueError, match=rf"{key}={below[key]}: must be at least {AT_LEAST[key]}\n  fix: {key}="):
            validate.check_ranges(below)
        validate.check_ranges(flat | {key: AT_LEAST[key]})
    for key in present(base, AT_MOST):
        with pytest.raises(ValueError, match=f"{key}=.*must be at most"):
            validate.check_ranges(flat | {key: AT_MOST[key] + 0.1})
        validate.check_ranges(flat | {key: AT_MOST[key]})
    for key in present(base, MORE_THAN):
        with pytest.raises(ValueError, match=f"{key}=0: must be more than 0"):
            validate.check_ranges(flat | {key: MORE_THAN[key]})
    for key in present(base, LESS_THAN):
        with pytest.raises(ValueError, match=f"{key}=1: must be less than 1"):
            validate.check_ranges(flat | {key: LESS_THAN[key]})


def test_no_number_may_be_infinite_or_nan(base: dict[str, Any]) -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        for key in ("optim.lr", "optim.weight_decay", "train.max_grad_norm", "model.dropout", "schedule.min_ratio"):
            assert f"{key}={value}: must be" in message(with_key(base, key, value))


@pytest.mark.parametrize("betas", [[], [0.9], [0.9, 0.95, 0.99], [1.0, 0.9], [0.9, -0.1]])
def test_betas(base: dict[str, Any], betas: list[float]) -> None:
    assert message(changed(base, optim__betas=betas)).startswith(f"optim.betas={betas}: must be two numbers")


@pytest.mark.parametrize(("name", "fix"), [("", "my-run"), ("../../x", "x"), ("a/b", "a-b"), (" ", "my-run")])
def test_a_name_that_would_leave_its_folder(base: dict[str, Any], name: str, fix: str) -> None:
    assert message(changed(base, name=name)).endswith(f"fix: name={fix}")
    validate.validate(changed(base, name=fix))


def test_heads_layers_and_sequence_lengths(base: dict[str, Any]) -> None:
    text = message(changed(base, model__dim=130))
    assert "model.dim=130: must be a multiple of model.num_heads=4" in text
    validate.validate(changed(base, model__dim=int(re.findall(r"model.dim=(\d+)", text)[-1])))
    validate.validate(changed(base, model__dim=130, model__num_heads=int(text.split(" or ")[-1])))
    sizes = MeshSizes(pp=5, tp=3)
    with pytest.raises(ValueError, match=r"strategy\.tp=3: must divide model\.num_heads=4"):
        validate.check_model(base["model"], sizes)
    with pytest.raises(ValueError, match=r"strategy\.pp=5.*\n  fix: strategy\.pp=1 strategy\.dp=-1"):
        validate.check_model(base["model"], MeshSizes(pp=5))
    assert "data.seq_len=129: the model takes at most" in message(changed(base, data__seq_len=129))
    validate.check_model({"_target_": "a.model.without.these"}, sizes)


def test_heads_of_keys_and_rotary_pairs() -> None:
    llama = compose("model=llama-tiny", "cluster.processes=2")
    text = message(changed(llama, model__num_kv_heads=6))
    assert text == "model.num_kv_heads=6: must divide model.num_heads=8\n  fix: model.num_kv_heads=2"
    validate.validate(changed(llama, model__num_kv_heads=2))
    text = message(changed(llama, model__dim=8 * 15))
    assert text.startswith("model.dim=120: a head has 15 elements") and text.endswith("fix: model.dim=128")
    text = message(changed(llama, model__rope_low_freq_factor=4.0))
    assert text.startswith("model.rope_low_freq_factor=4.0: must be less than model.rope_high_freq_factor=4.0")
    for key in ("model.rope_theta", "model.norm_eps"):
        assert f"{key}=0: must be more than 0" in message(with_key(llama, key, 0))
    for key in ("model.rope_factor", "model.rope_original_len", "model.hidden_dim", "model.num_kv_heads"):
        assert f"{key}=0: must be at least 1" in message(with_key(llama, key, 0))
    validate.check_model({"_target_": "a.model", "rope_theta": 1e4, "num_layers": 2}, MeshSizes(pp=2))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_tensor_parallel_ranks_divide_both_kinds_of_heads(kv_heads: int, shared: int, tp: int) -> None:
    model = {"num_heads": kv_heads * shared, "num_kv_heads": kv_heads}
    if kv_heads % tp == 0:
        validate.check_model(model, MeshSizes(tp=tp))
        return
    setting = "num_kv_heads" if kv_heads * shared % tp == 0 else "num_heads"
    with pytest.raises(ValueError, match=rf"strategy\.tp={tp}: must divide model\.{setting}=") as error:
        validate.check_model(model, MeshSizes(tp=tp))
    fix = str(error.value).partition("fix: ")[2]
    if fix != "strategy=fsdp, without strategy.tp":
        validate.check_model(model, MeshSizes(tp=int(re.findall(r"strategy\.tp=(\d+)", fix)[0])))


def test_a_vocabulary_smaller_than_the_data(base: dict[str, Any], tmp_path: Path) -> None:
    synthetic = compose("data=synthetic", "cluster.processes=2")
    assert "model.vocab_size=256: the data has 300" in message(changed(synthetic, data__vocab_size=300))
    (tmp_path / "text.txt").write_text("words and words\n" * 40)
    text = compose("data=text", f"data.path={tmp_path / 'text.txt'}", "cluster.processes=2")
    assert "model.vocab_size=255: the data has 256" in message(changed(text, model__vocab_size=255))


@pytest.mark.parametrize("key", ["train", "train.steps", "checkpoint.keep", "trust", "model", "strategy", "run_dir"])
def test_what_is_taken_out_is_missed(base: dict[str, Any], key: str) -> None:
    config = copy.deepcopy(base)
    *path, leaf = key.split(".")
    del (config[path[0]] if path else config)[leaf]
    assert message(config) == f"{key}: is required and cannot be deleted\n  fix: leave out ~{key}"


# ---- did you mean --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.stpes", "train.steps"), ("steps", "train.steps"), ("lr", "optim.lr"), ("stratgy", "strategy"),
        ("modle", "model"), ("train.gloabl_batch_size", "train.global_batch_size"), ("optimizer", "optim"),
        ("warmup_steps", "schedule.warmup_steps"), ("train.lr", "optim.lr"), ("nodes", "cluster.nodes"),
    ],
)  # fmt: skip
def test_did_you_mean(typed: str, meant: str) -> None:
    text = str(unknown(typed, files.known_settings()))
    rule = f"{re.escape(typed)}: there is no such setting\n  fix: (did you mean )?{re.escape(meant)}\\b"
    assert re.match(rule, text)


def test_without_a_near_name_the_neighbours_are_listed() -> None:
    text = str(unknown("train.qqqqqqqqqq", ["train.steps", "train.seed", "model.dim"]))
    assert text.endswith("fix: leave out train.qqqqqqqqqq, or use one of train.seed, train.steps")


def test_of_several_near_names_only_those_that_are_meant() -> None:
    names = ["train.steps", "train.spike", "train.seed"]
    assert str(unknown("train.stpes", names)).endswith("did you mean train.steps?")
    near = ["train.eval_every", "train.eval_very"]
    assert str(unknown("train.eval_ever", near)).endswith("did you mean train.eval_every or train.eval_very?")
    assert str(unknown("train.eval_ever", near, takes=near[1].__eq__)).endswith("did you mean train.eval_very?")


# ---- batch arithmetic ----------------------------------------------------------------------------------------

counts = st.integers(1, 64)


def batch_config(total: int, micro: int | None) -> dict[str, Any]:
    return {"train": {"global_batch_size": total, "micro_batch_size": micro}}


@given(st.integers(1, 2000), st.one_of(st.none(), counts), counts)
def test_batch_sizes(total: int, asked: int | None, dp: int) -> None:
    """Accepted: global = micro × accumulation × dp. Refused: what the messages propose is accepted in the end."""
    sizes = MeshSizes(dp=dp)
    for _ in range(3):
        try:
            per_rank, micro, accumulation = batch_sizes(batch_config(total, asked), sizes)
        except ValueError as error:
            text = str(error)
            if text.startswith(f"train.global_batch_size={total}: "):
                assert total % dp
                proposed = [int(n) for n in re.findall(r"\d+", text.split("fix: train.global_batch_size")[1])]
                assert 1 <= len(proposed) <= 2
                assert all(n > 0 and abs(n - total) < dp * (asked or 1) for n in proposed)
                for number in proposed:
                    batch_sizes(batch_config(number, asked), sizes)
                total = proposed[-1]
            else:
                assert text.startswith(f"train.micro_batch_size={asked}: ")
                assert total % dp == 0 and asked is not None and (total // dp) % asked
                smaller = int(re.findall(r"train.micro_batch_size=(\d+)", text)[-1])
                (batches,) = re.findall(r"train.global_batch_size=(\d+) or (\d+)", text)
                for number in map(int, batches):
                    batch_sizes(batch_config(number, asked), sizes)
                assert smaller < asked, "a smaller one surely fits in memory"
                asked = smaller
            continue
        assert micro * accumulation * dp == total
        assert per_rank * dp == total
        assert micro <= (asked or per_rank)
        return
    pytest.fail("still refused after following two messages")


@given(st.integers(1, 40), counts, counts)
def test_a_batch_that_divides_is_accepted_as_asked(accumulation: int, micro: int, dp: int) -> None:
    total = accumulation * micro * dp
    assert batch_sizes(batch_config(total, micro), MeshSizes(dp=dp)) == (accumulation * micro, micro, accumulation)


@given(counts, st.integers(1, 8), st.integers(1, 8))
def test_only_data_ranks_share_the_batch(total: int, tp: int, pp: int) -> None:
    per_rank, micro, accumulation = batch_sizes(batch_config(total, None), MeshSizes(pp=pp, dp=1, tp=tp))
    assert per_rank == total == micro * accumulation
    assert pp > 1 or accumulation == 1, "only a pipeline cuts a batch that nobody asked to cut"
    assert accumulation >= min(total, 4 * pp if pp > 1 else 1), "and then into enough parts to fill it"


# ---- resume --------------------------------------------------------------------------------------------------


def other(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "x"] if isinstance(value, list) else "something-else"


def is_free(key: str) -> bool:
    return any(key == name or key.startswith(name + ".") for name in FREE_ON_RESUME)


def test_each_setting_is_free_or_refused_and_then_allowed_by_name(base: dict[str, Any], tmp_path: Path) -> None:
    """Every single setting of the default configuration, one after the other."""
    free, refused = [], []
    for key, value in flatten(base).items():
        new = with_key(base, key, other(value))
        if is_free(key):
            check_resume(base, new, [], tmp_path)
            free.append(key)
            continue
        with pytest.raises(ValueError, match="resume=") as error:
            check_resume(base, new, [], tmp_path)
        assert f"    {key}: {value} → {other(value)}" in str(error.value)
        before, after = flatten(base), flatten(new)
        if changes_shapes(key, before, after):  # it can be allowed, and is not proposed
            assert f"fix: leave out {key}: the saved weights" in str(error.value)
        else:
            assert f"fix: leave out {key}, or allow what changed: 'resume_allow=[{key}]'" in str(error.value)
        check_resume(base, new, [key], tmp_path)
        check_resume(base, new, [key.split(".")[0]], tmp_path)
        refused.append(key)
    # the promise in words: how it is run may change, what is computed may not
    assert {"strategy.dp", "cluster.processes", "checkpoint.every", "compile", "train.micro_batch_size"} <= set(free)
    assert {"train.seed", "train.steps", "train.global_batch_size", "optim.lr", "model.dim", "precision.dtype",
            "data._target_", "schedule.warmup_steps", "train.max_grad_norm"} <= set(refused)  # fmt: skip
    flat = flatten(base)
    shapes = {key for key in refused if changes_shapes(key, flat, flat | {key: other(flat[key])})}
    assert {"model.dim", "model.num_layers", "model._target_", "lora.rank"} <= shapes
    assert not {"model.dropout", "train.steps", "optim.lr"} & shapes


def test_a_refused_resume_names_all_that_changed(base: dict[str, Any], tmp_path: Path) -> None:
    new = changed(base, train__seed=5, optim__lr=0.5, train__steps=9)
    with pytest.raises(ValueError, match=r"'resume_allow=\[train\.steps,optim\.lr,train\.seed\]'") as error:
        check_resume(base, new, ["train.steps"], tmp_path)
    assert "train.steps:" not in str(error.value)
    check_resume(base, new, ["train.steps", "optim.lr", "train.seed"], tmp_path)


def test_more_steps_for_a_run_that_is_done_are_to_be_allowed(base: dict[str, Any], tmp_path: Path) -> None:
    new = changed(base, train__steps=base["train"]["steps"] + 9)
    fixes = {"running": "leave out train.steps, or", "done": "'resume_allow=[train.steps]', which allows"}
    for status, fix in fixes.items():
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        with pytest.raises(ValueError, match=f"fix: {re.escape(fix)}"):
            check_resume(base, new, [], tmp_path)


def test_a_setting_that_came_or_went_counts_as_changed(base: dict[str, Any], tmp_path: Path) -> None:
    new = copy.deepcopy(base)
    del new["model"]["dropout"]
    for pair in ((base, new), (new, base)):
        with pytest.raises(ValueError, match=r"model\.dropout: (not set → 0\.0|0\.0 → not set)"):
            check_resume(*pair, [], tmp_path)


def test_allowing_a_name_that_is_none_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_allow=\[train\.stpes\]: .*\n  fix: 'resume_allow=\[train\.steps\]'"):
        check_resume(base, base, ["train.stpes"], tmp_path)


@pytest.mark.parametrize(
    ("model", "names"),
    [("gpt2-tiny", "qkv proj up down"), ("llama-tiny", "q k v proj gate up down"), ("bert-tiny", "q k v proj up down")],
)
def test_adapters_of_layers_that_there_are(model: str, names: str) -> None:
    for name in names.split():
        compose(f"model={model}", "lora.rank=2", f"lora.targets=[{name}]", "cluster.processes=1")
    with pytest.raises(ValueError, match=r"lora.targets=\['qq'\]: .*no linear layer") as error:
        compose(f"model={model}", "lora.rank=2", "lora.targets=[qq]", "cluster.processes=1")
    assert all(name in str(error.value) for name in names.split())


def test_the_table_of_linear_layers_is_that_of_the_models() -> None:
    import torch
    from torch import nn

    found: dict[str, set[str]] = {}
    for option in set(options_of("model")) - {"hf"}:  # it is what a folder holds
        section = files.section("model", option)
        with torch.device("meta"):
            model = build(section | ({"num_layers": 2} if "num_layers" in section else {}), [])
        names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        found.setdefault(section["_target_"], set()).update(names)
    assert found == {target: set(names) for target, names in LINEAR_LAYERS.items()}


def test_the_metrics_that_are_known_before_the_start_are_those_of_the_models() -> None:
    import torch

    from dtrain.checks.checkpoint import known_metrics
    from dtrain.train.metrics import evaluated

    for option in set(options_of("model")) - {"hf"}:
        section = files.section("model", option)
        with torch.device("meta"):
            model = build(section | ({"num_layers": 2} if "num_layers" in section else {}), [])
        config = {"model": section, "hooks": {"early_stop": {}}, "choices": {"loss": "own"}}
        values = [1.0] * (1 + len(getattr(model, "eval_metrics", ())))
        if section.get("task") == "classify" and model.num_classes <= 5:
            values[2] = math.nan  # top 5
        found = evaluated(model, values)
        assert set(known_metrics(config)) == set(found), option
        assert known_metrics(config | {"hooks": {"mine": {}}}) == [], "a hook may add some"
        assert known_metrics(config | {"choices": {"loss": "mse"}}) == []


@pytest.mark.parametrize(
    ("metric", "fix"), [("val_los", "val_loss"), ("val_accuracy", "val_loss"), ("val_perplexty", "val_perplexity")]
)
def test_a_metric_that_no_evaluation_has_is_refused(base: dict[str, Any], metric: str, fix: str) -> None:
    with pytest.raises(ValueError, match=rf"keep_best={metric}: .* have val_loss, val_perplexity\n  fix: .*={fix}$"):
        validate.validate(changed(base, checkpoint__keep_best=metric))
    stop = files.section("hooks", "early_stop") | {"metric": metric, "mode": "max" if "acc" in metric else "min"}
    with pytest.raises(ValueError, match=rf"metric={metric}: .* have val_loss, val_perplexity\n  fix: .*={fix}$"):
        validate.validate(base | {"hooks": {"early_stop": stop}})


def test_usable_numbers_are_those_that_all_other_settings_allow(base: dict[str, Any]) -> None:
    elastic = changed(base, cluster__processes="1:4")
    assert validate.usable_sizes(elastic) == [1, 2, 4], "a batch of 32 cannot be divided by 3"
    assert validate.validate(elastic).dp == 4, "the largest"
    assert validate.usable_sizes(changed(elastic, train__global_batch_size=24)) == [1, 2, 3, 4]
    assert validate.usable_sizes(base) == [] and validate.largest(base) is base
    assert validate.usable_sizes(compose("strategy=tensor", "strategy.tp=2", "cluster.processes=1:6")) == [2, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.processes=3:4"], "only 4 of these numbers can be used; with 3: train.global_batch_size=32"),
        (["cluster.processes=2:4", "profile=torch"], "profile=torch: a profile is of one number of ranks"),
        (["cluster=slurm", "cluster.processes=2:4"], "cluster.nodes=2:4"),
        (
            ["cluster=slurm", "cluster.nodes=2:4", "cluster.launcher=torchrun", "cluster.node_rank=0"],
            "nodes that are started by hand",
        ),
        (["cluster.processes=2:4", "optim.lr=-1"], "optim.lr=-1: must be more than 0"),
    ],
)
def test_ranges_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        validate.usable_sizes(compose(*overrides))


@pytest.mark.parametrize("model", ["resnet18", "convnet", "vit-tiny"])
def test_texts_do_not_suit_an_image_model(model: str) -> None:
    rule = f"its targets are the next tokens, but model={model} predicts classes of images"
    with pytest.raises(ValueError, match=f"data=stdlib: {rule}\n  fix: data=digits, "):
        compose(f"model={model}", "data=stdlib", "data.seq_len=128")
