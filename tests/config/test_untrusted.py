"""Recipes and run folders from elsewhere: whatever stands in them, nothing runs and no secret is read.

The fuzz puts code, resolvers and nonsense at every setting of every group, and asks the functions that the commands
call: `store_recipe`, `store_as_run` and `resolve` (launch, resume), `load_model` (evaluate, sample), `load` and
`check_run` (a rank). An audit hook listens for any program that is started.
"""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from dtrain.cli import main
from dtrain.config import files as config
from dtrain.config import run_file, schema
from dtrain.config.build import build, typed_trust
from dtrain.config.files import CONF, GROUPS, flatten, options_of
from dtrain.config.hydra_errors import MISTAKES, explain
from dtrain.inference.sample import load_model
from dtrain.launch import recipes, resume_arguments
from dtrain.launch.app import slug
from dtrain.launch.compose import hydra_config
from dtrain.launch.resolve import resolve
from tests.patience import patience
from tests.world import SMALL

CANARY = "canary-5f0c1d77"
STARTED: list[str] = []  # what the audit hook heard while it was armed
ARMED: list[bool] = []
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile")


def listen(event: str, arguments: Any) -> None:
    if ARMED and event in PROGRAMS:
        STARTED.append(f"{event} {arguments}")


sys.addaudithook(listen)


def code(flag: Path) -> list[dict[str, Any]]:
    """Sections that would leave a flag behind if they were built, directly or by a detour."""
    touch = ["touch", str(flag)]
    system = {"_target_": "os.system", "command": f"touch {flag}"}
    node = {"nodes": ["here"], "tasks_per_node": 1, "env": {}, "log": f"{flag}.log"}
    return [
        {"_target_": "dtrain.preflight.start.local_starter", "argv": touch, **node},
        {"_target_": "dtrain.preflight.run.local_starter", "argv": touch, **node},
        system,
        {"_target_": "subprocess.Popen", "args": touch},
        {"_target_": "builtins.eval", "_args_": [f"open({str(flag)!r}, 'w')"]},
        {"_target_": "importlib.import_module", "name": "antigravity"},
        {"_target_": "functools.partial", "_partial_": True, "func": system},
        {"_target_": "dtrain.config.build.build", "section": system, "trust": ["os"]},
        {"_target_": "dtrain.config.build.locate", "target": "os.system", "trust": ["os"]},
        {"_target_": "dtrain.preflight.start.main", "argv": ["1", *touch]},
        {"_target_": "dtrain.launch.local.subprocess.Popen", "args": touch},
        {"_target_": "dtrain.models.losses.own", "_recursive_": True, "more": system},
        {"_target_": "torch.load", "f": str(flag), "weights_only": False},
        {"_target_": ["os.system"], "command": f"touch {flag}"},
        {"plain": [{"deep": [system]}]},
        {"_convert_": "all", "_args_": touch},
    ]


RESOLVERS = [
    "${oc.env:WANDB_API_KEY}",
    "a-${oc.env:WANDB_API_KEY}-b",
    "${oc.env:${name}}",
    "${oc.env:WANDB_API_KEY,${train.steps}}",
    "${oc.decode:${oc.env:WANDB_API_KEY}}",
    "${oc.create:{a: 1}}",
    "${oc.select:train.steps}",
    "${${data.path}.env:WANDB_API_KEY}",
    "\\${oc.env:WANDB_API_KEY}",
    "\\\\${oc.env:WANDB_API_KEY}",
    "${hydra:runtime.cwd}",
    "${hydra:job.env_set}",
    "${oc.deprecated:train.steps}",
    "${dtrain.slug:${oc.env:WANDB_API_KEY}}",
    "${now:%Y}${oc.env:WANDB_API_KEY}",
    "${oc.dict.keys:train}",
]
NONSENSE: list[Any] = [
    None, True, -1, 0, 7, 10**5, 2**40, 10**30, 1.5, float("nan"), float("inf"), "", "x", "???", "../../etc", "a\nb",
    [], {}, [[[]]], ["x"], {"x": 1}, {1: 2}, {"_x": 1}, {"": 1}, {"a.b": 1}, "${train.steps}", "${name}",
    "${nowhere.x}", "${train", "é" * 99,
]  # fmt: skip
MEANS_CODE = (
    "setup", "python", "srun", "sbatch", "container_image", "container_mounts",
    "image", "pod", "env", "secret_env", "service_account", "volumes", "context",
)  # fmt: skip


def settings_of_all_options() -> list[tuple[str, ...]]:
    """Where something can stand: every setting of every option of every group, every plain one, and new ones."""
    plain = config.read_yaml(CONF / "config.yaml")
    names = {key for key in flatten({k: v for k, v in plain.items() if k not in ("defaults", "hydra")})}
    names |= {"choices", "recipe", "zzz", *GROUPS, *(f"{group}.zzz" for group in GROUPS)}
    for group in GROUPS:
        for option in options_of(group):
            section = {key: value for key, value in config.section(group, option).items() if key != "_target_"}
            names |= {f"{group}.{key}" for key in flatten(section)}
            names |= {f"{group}.{key}.zzz.yyy" for key in section if not key.startswith("_")}
    return sorted(tuple(name.split(".")) for name in names)


def put(tree: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for key in place[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[place[-1]] = value


class World:
    """One composed configuration, one run folder, and a flag that nothing may raise."""

    def __init__(self, folder: Path) -> None:
        self.flag, self.folder, self.run = folder / "flag", folder, folder / "run"
        OmegaConf.register_new_resolver("dtrain.slug", slug, replace=True)
        words = [*SMALL, "cluster.processes=1", f"run_dir={folder}/new"]
        self.cfg = hydra_config(words)
        self.run.mkdir()
        run_file.save(self.run, resolve(self.cfg) | {"run_dir": str(self.run)})
        self.config: dict[str, Any] = yaml.safe_load((self.run / "config.yaml").read_text())

    def merged(self, group: str, name: str) -> DictConfig:
        """The configuration with a stored recipe over it, as Hydra lays it, which takes 0.3 s a time."""
        from hydra.core.config_store import ConfigStore

        node: Any = copy.deepcopy(ConfigStore.instance().load(f"{group}/{name}.yaml").node)
        node.pop("defaults", None)
        OmegaConf.set_struct(node, False)
        cfg = copy.deepcopy(self.cfg)
        OmegaConf.set_struct(cfg, False)
        both: Any = OmegaConf.merge(cfg, node)
        return both

    def as_recipe(self, tree: Any) -> None:
        path = self.folder / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        recipes.store_recipe(path)
        resolve(self.merged("recipe", "theirs"))

    def as_run(self, tree: Any) -> None:
        (self.run / "config.yaml").write_text(yaml.safe_dump(tree))
        resume_arguments.store_as_run(self.run, overridden=[])
        resolve(self.merged("recipe", "as-run"))

    def as_reader(self, tree: Any) -> None:
        (self.run / "config.yaml").write_text(yaml.safe_dump(tree))
        load_model(self.run, [])

    def as_rank(self, tree: Any) -> None:
        (self.run / "config.yaml").write_text(yaml.safe_dump(tree))
        cfg = run_file.Settings(run_file.completed(run_file.load(self.run)) | {"trust": typed_trust()})
        schema.check_run(cfg, cfg.trust, GROUPS)
        build(cfg.schedule, cfg.trust, steps=1)
        build(cfg.optim, cfg.trust, global_batch_size=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fuzz")
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("WANDB_API_KEY", CANARY)
        yield World(folder)


class TooLate(BaseException):
    """No answer in 10 s. Not an Exception: the code under test turns some of those into a refusal."""


def attempt(ask: Any, tree: Any) -> str:
    """The refusal, or "" when it was taken; any other exception, or 10 s without an answer, is a failure."""

    def too_long(number: int, frame: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(round(patience(10)))
    try:
        ask(tree)
    except MISTAKES as error:
        return explain(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


def cases(world: World, seed: int, count: int) -> Iterator[tuple[str, Any, bool]]:
    """(command, tree, must be refused): places in turn, so that each has its share; the rest is drawn."""
    draw, places = random.Random(seed), settings_of_all_options()
    draw.shuffle(places)
    asks = ("as_recipe", "as_run", "as_reader", "as_rank")
    for number in range(count):
        place, ask = places[number % len(places)], asks[number % len(asks)]
        kind = draw.choice(("code", "code", "resolver", "nonsense"))
        value: Any = {"code": code(world.flag), "resolver": RESOLVERS, "nonsense": NONSENSE}[kind][:]
        value = draw.choice(value)
        for _ in range(draw.randrange(4)):
            value = draw.choice(
                ([value], {"zzz": value}, [{"a": [value]}], {"env": {"X": {"value": value, "why": "x"}}})
            )
        tree: dict[str, Any] = {} if ask == "as_recipe" else copy.deepcopy(world.config)
        put(tree, place, value)
        if draw.random() < 0.2:
            put(tree, ("trust",), ["os", "subprocess", "builtins", "dtrain"])
        ours = place[0] == "cluster" and len(place) > 1 and place[1] in MEANS_CODE  # typed anew, whatever stands there
        unread = place[0] in ("trust", "resume", "resume_allow", "dry_run", "force", "run_dir", "recipe", "choices")
        unread = (unread and ask == "as_run") or (place == ("trust",) and ask == "as_rank")
        certain = kind != "nonsense" and not ours and not unread
        # the readers leave alone what they do not read; whatever it is, it is not built
        yield ask, tree, certain


def fuzz(world: World, seed: int, count: int) -> None:
    taken = []
    ARMED.append(True)
    try:
        for ask, tree, certain in cases(world, seed, count):
            said = attempt(getattr(world, ask), tree)
            assert CANARY not in said, (ask, tree)
            assert not said or "\n  fix: " in said, (said, ask, tree)
            assert said or not certain, (ask, tree)
            if not said:
                taken.append(tree)
            assert not STARTED and not world.flag.exists(), (ask, tree, STARTED)
    finally:
        ARMED.clear()
    assert not [path for path in world.folder.iterdir() if path.name not in ("run", "theirs.yaml", "flag.log")]
    assert len(taken) < count / 4 and (taken or count < 1000), "some of it is harmless, and most is not"


def test_nothing_in_a_file_runs_or_reads_the_environment(world: World) -> None:
    fuzz(world, seed=23, count=200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_runs_over_and_over(seed: int, world: World) -> None:
    fuzz(world, seed, count=2000)


def test_the_flag_would_be_raised(world: World, tmp_path: Path) -> None:
    """The same section where it is trusted: so the fuzz can fail."""
    flag = tmp_path / "flag"
    ARMED.append(True)
    build(code(flag)[3], trust=["subprocess"]).wait()
    ARMED.clear()
    assert flag.exists() and STARTED.pop(0).startswith("subprocess.Popen")
    STARTED.clear()


# ---- bounds --------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i or ''}, *a{i or ''}]}}\n" for i in range(40))
BOMBS = {
    "laughs": LAUGHS,
    "merges": MERGES,
    "itself": "a: &a [*a]\n",
    "deep": "a: " + "[" * 200_000,
    "indented": "".join(f"{' ' * i}a:\n" for i in range(600)),
    "wide": "a: [" + "1," * 100_000 + "]",
    "long": "a: " + "9" * 500_000,
    "base sixty": "a: 1" + ":1" * 400_000,
    "large": "#" * 2**21,
    "references": "".join(f"a{i}: ${{a{i + 1}}}${{a{i + 1}}}\n" for i in range(60)) + "a60: x\n",
    "lists": "".join(f"a{i}: ['${{a{i + 1}}}', '${{a{i + 1}}}']\n" for i in range(60)) + "a60: x\n",
}


def test_a_small_file_cannot_fill_memory_or_take_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "launch.json").write_text("{}")
    os.mkfifo("fifo.yaml")
    Path("zero.yaml").symlink_to("/dev/zero")
    files = {"fifo.yaml": "fifo", "zero.yaml": "zero"} | {f"{name}.yaml": name for name in BOMBS}
    for file, name in files.items():
        if name in BOMBS:
            Path(file).write_text(BOMBS[name])
        (run / "config.yaml").unlink(missing_ok=True)
        (run / "config.yaml").symlink_to(tmp_path / file)
        for command in (
            ["launch", f"recipe=./{file}"],
            ["evaluate", "run"],
            ["runs", "run", "run"],
        ):
            said = attempt(lambda words: print(main(words)), command)
            out, err = capsys.readouterr()
            assert command[0] == "runs" or (out.strip() == "2" and "\n  fix: " in err and len(err) < 2000), (name, err)
            assert not said, (name, command)


def test_a_recipe_may_still_refer_to_other_settings_and_to_what_conf_has(world: World) -> None:
    for tree in (
        {"train": {"eval_every": "${train.log_every}"}, "optim": {"_target_": "dtrain.optim.build.sgd", "betas": None}},
        {"name": "${hydra:runtime.choices.model}-${hydra:runtime.choices.strategy}"},
        {"data": {"seq_len": "${model.seq_len}"}, "defaults": [{"override /model": "gpt2-tiny"}, "_self_"]},
    ):
        said = attempt(world.as_recipe, tree)
        assert not said or "optim.betas" in said, said


@pytest.mark.parametrize(
    "defaults",
    [
        [{"override /model": "../../../../../../../../proc/self/cwd/evil"}], ["//proc/self/cwd/evil"], "model",
        [{"override /hydra/launcher": "x"}], [{"/model@hydra.x": "y"}], [{"override /model": ["a", "b"]}],
        [{"override /model": "${oc.env:HOME}"}],
    ],
)  # fmt: skip
def test_options_are_chosen_by_name(defaults: Any, world: World) -> None:
    """Hydra reads a path to any file, and builds what it says under hydra/ before anybody can look."""
    assert "fix: " in attempt(world.as_recipe, {"defaults": defaults})


@pytest.mark.parametrize(
    "option", ["../../../../../../../../proc/self/cwd/evil", "/proc/evil", ["a"], {"a": 1}, "${x}", 1]
)
def test_a_runs_choices_are_names(option: Any, world: World) -> None:
    said = attempt(world.as_run, world.config | {"choices": {"model": option}})
    assert "is not an option" in said or "only the command line" in said, said


@pytest.mark.parametrize(
    "word",
    [
        "trust=choice([os],[sys])", "model=evil.Net,evil.Other", "cluster.python='touch x','touch y'", "recipe=a,b",
        "hydra.sweep.dir=a,b", "model._target_=os.system,os.getcwd", "name=${oc.env:WANDB_API_KEY},b",
        "cluster.sbatch.x=a,b",
    ],
)  # fmt: skip
def test_a_search_space_in_a_recipe_types_no_more_than_a_recipe_may(word: str, world: World, tmp_path: Path) -> None:
    from dtrain.commands.search.request import read_request

    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump({"search": {"space": [word]}}))
    with pytest.raises(ValueError, match="on the command line only"):
        read_request([f"recipe={file}"])


@pytest.mark.parametrize("setting", ["name", "init_from"])
def test_a_resolver_cannot_be_put_together_from_harmless_parts(setting: str, world: World) -> None:
    """Hydra resolves the name of the run's folder once more."""
    parts = {"resume_allow": ["$", "{oc.env:WANDB_API_KEY}"], setting: "${resume_allow[0]}${resume_allow[1]}"}
    assert "only the command line" in attempt(world.as_recipe, parts)


def test_what_ranks_would_not_read_is_refused_by_the_launcher() -> None:
    from dtrain.config.untrusted import LONGEST, MOST_IN_A_RUN, check_own

    check_own({"data": {"files": ["x"] * 2500}, "name": "x" * LONGEST})
    with pytest.raises(ValueError, match=r"data\.files=….*items"):
        check_own({"data": {"files": ["x"] * MOST_IN_A_RUN}, "name": "x"})
    with pytest.raises(ValueError, match=r"name=….*characters"):
        check_own({"name": "x" * (LONGEST + 1)})


def test_the_launcher_asks_whether_ranks_would_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *SMALL, f"name={'x' * 5000}", "run_dir=run"]) == 2
    assert "name=…" in (err := capsys.readouterr().err) and "characters" in err and not Path("run").exists()


ADAMW = "dtrain.optim.build.adamw"
NESTED = {"_target_": "dtrain.preflight.start.local_starter"}


@pytest.mark.parametrize(
    ("tree", "setting"),
    [
        ({"optim": {"_target_": ADAMW, "named_parameters": NESTED}}, "optim.named_parameters._target_"),
        ({"train": {"steps": [{"deep": NESTED}]}}, "train.steps.deep._target_"),
        ({"model": NESTED}, "model._target_"),  # of dtrain's, and no model
        ({"_target_": ADAMW}, "_target_"),
        ({"optim": {"_target_": ADAMW, "_args_": []}}, "optim._args_"),
        ({"optim": {"_target_": ADAMW, "_partial_": "yes"}}, "optim._partial_"),
        ({"optim": {"_target_": ADAMW, "_partial_": False}}, "optim._partial_"),  # conf/optim/ has it with true
        ({"optim": {"_partial_": [NESTED]}}, "optim._partial_"),
        ({"model": {"_target_": "mine.Net", "_partial_": "yes"}}, "model._partial_"),
    ],
)  # fmt: skip
def test_a_target_out_of_place_is_refused_by_its_place_alone(tree: dict[str, Any], setting: str) -> None:
    """Before anything asks whether there is such a setting, or what type it has."""
    from dtrain.config.untrusted import check_targets

    check_targets({"optim": {"_target_": ADAMW, "lr": 1}, "train": {"steps": [1]}})
    with pytest.raises(ValueError, match=rf"^{re.escape(setting)}="):
        check_targets(tree)
