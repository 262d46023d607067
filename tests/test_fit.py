"""dtrain.fit: a run from Python is the run of the command line. The page of docs/your-own.md is what is run here."""

import functools
import importlib
import json
import logging
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import dtrain
from dtrain.cli import main
from dtrain.launch import python_objects
from dtrain.launch.local import Local
from tests.patience import patience
from tests.test_bad_inputs import COMPOSE_ONCE
from tests.world import ROOT, losses, summary

PAGE = (ROOT / "docs" / "your-own.md").read_text()


def block_after(words: str) -> str:
    """The first indented block of the page after some words of it."""
    lines = PAGE[PAGE.index(words) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    "))
    length = next(i for i, line in enumerate(lines[first:]) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[first : first + length])).strip() + "\n"


NET, COMMAND, SCRIPT = (block_after(words) for words in ("net.py:", "**From the command line**", "**From a script**"))
SHORTEST, EXPORTED = block_after("my.py:"), block_after("which plain PyTorch loads:")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page's files in a folder, which is the current one."""
    path = tmp_path_factory.mktemp("page")
    (path / "net.py").write_text(NET)
    (path / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(path)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield path
        sys.modules.pop("net", None)


def python(*words: str, **options: Any) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, **options
    )


def latest(folder: Path) -> Path:
    return max((folder / "outputs").glob("*/*"), key=lambda p: p.stat().st_mtime_ns)


# ---- real runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def commanded(folder: Path) -> Path:
    """The page's command, run."""
    words = shlex.split(COMMAND)
    assert words[:2] == ["python", "launch.py"]
    process = python(str(ROOT / "launch.py"), *words[2:], "run_dir=commanded", "cluster.processes=1")
    said = process.communicate(timeout=patience(120))[0]
    assert process.returncode == 0, said
    return folder / "commanded"


def test_the_script_of_the_page_follows_its_command_under_another_strategy(folder: Path, commanded: Path) -> None:
    process = python("train.py")
    said = process.communicate(timeout=patience(120))[0]
    assert process.returncode == 0, said
    run_dir = latest(folder)
    assert summary(run_dir)["strategy"] == "fsdp" and summary(commanded)["strategy"] == "ddp"
    assert said.splitlines()[-1] == f"done {summary(run_dir)['val_loss']} {run_dir}"
    ours, theirs = losses(run_dir), losses(commanded)
    assert ours.keys() == theirs.keys() == set(range(1, 21))
    assert max(abs(ours[step] - theirs[step]) for step in ours) <= 1e-5
    assert abs(summary(run_dir)["val_loss"] - summary(commanded)["val_loss"]) <= 1e-5
    assert theirs[20] < theirs[1]


def test_the_shortest_script_and_what_it_trained(folder: Path) -> None:
    (folder / "shortest.py").write_text(SHORTEST.replace("epochs=5", "epochs=1, run_dir='mine-first'"))
    process = python("shortest.py")
    said = process.communicate(timeout=patience(120))[0]
    assert process.returncode == 0, said
    assert main(["export", "mine-first", "model.safetensors"]) == 0
    loaded: dict[str, Any] = {}
    exec("from shortest import net\n" + EXPORTED, loaded)
    model = dtrain.load("mine-first").model(trust=["shortest"])
    points = torch.randn(4, 2)
    assert torch.equal(model(points), loaded["model"](points))
    assert [place.name for place in sorted((folder / "mine-first" / "logs").glob("rank-*"))] == [
        "rank-0.log",
        "rank-1.log",
    ]


def test_fit_is_the_command_to_the_bit_and_can_be_called_again_to_go_on(
    folder: Path, commanded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from net import Net, focal, rings  # type: ignore[import-not-found]

    things: dict[str, Any] = {"model": functools.partial(Net, 32), "data": rings, "loss": (focal, {"gamma": 1.5})}
    before = signal.getsignal(signal.SIGINT), os.environ.copy(), list(sys.argv), logging.getLogger().level
    result = dtrain.fit(**things, strategy="ddp", processes=1, train={"steps": 20, "stop_after": 12})
    assert before == (signal.getsignal(signal.SIGINT), os.environ.copy(), list(sys.argv), logging.getLogger().level)
    assert not GlobalHydra.instance().is_initialized() and not logging.getLogger("dtrain").disabled
    assert result.status == "done" and result.summary["steps"] == 12
    assert result.run_dir == latest(folder)
    expected = losses(commanded)
    assert losses(result.run_dir) == {step: expected[step] for step in range(1, 13)}, "every bit"
    record = json.loads((result.run_dir / "launch.json").read_text())
    assert "dtrain launch model=net.Net data=net.rings loss=net.focal strategy=ddp model.dim=32" in record["command"]

    again = dtrain.fit(**things, resume="latest", **{"cluster.processes": 1})
    assert again.run_dir == result.run_dir and losses(again.run_dir) == expected
    assert again.summary["weights_sha256"] == summary(commanded)["weights_sha256"]
    model = again.load()
    assert type(model) is Net and vars(model).keys() == vars(Net(32)).keys() and not model.training
    inputs, _ = rings()["val"]
    expected = Net(32)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs), expected(inputs)), "its own forward"
    assert not torch.equal(model.last.weight, again.load(at=12).last.weight), "another checkpoint"
    assert torch.equal(model.last.weight, dtrain.load(again.run_dir).model(trust=["net"]).last.weight)
    with pytest.raises(ValueError, match=r'fix: model\(trust=\["net"\]\)'):
        dtrain.load(again.run_dir).model()


def test_the_scripts_own_class_is_the_class_of_the_loaded_model(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import dtrain\n"
        "from net import Net, focal, rings\n"
        "class Mine(Net): ...\n"
        "if __name__ == '__main__':\n"
        "    train = {'steps': 2, 'eval_batches': 0}\n"
        "    result = dtrain.fit((Mine, {'dim': 4}), rings, loss=focal, processes=1, run_dir='mine', train=train)\n"
        "    print('SAME', type(result.load()) is Mine)\n"
        "    result.load(at='best')\n"
    )
    process = python("mine.py")
    said = process.communicate(timeout=patience(120))[0]
    assert "SAME True" in said, said
    assert process.returncode == 2 and said.count('File "') == 1 and 'mine.py", line 8, in <module>' in said, said
    assert re.search(r'ValueError: load\(at="best"\): the run did not keep .*\n  fix: load\(at=2\)', said), said


def test_a_script_that_does_not_guard_its_call_is_told_by_its_ranks(folder: Path) -> None:
    (folder / "bare.py").write_text(
        "import dtrain\n"
        "from net import Net, focal, rings\n"
        "class Mine(Net): ...\n"
        "try:\n"
        "    dtrain.fit(model=(Mine, {'dim': 4}), data=rings, loss=focal, processes=1, run_dir='bare')\n"
        "except dtrain.RunFailed as error:\n"
        "    print('CAUGHT', error.exit_code, error)\n"
    )
    said = python("bare.py").communicate(timeout=patience(120))[0]
    assert "CAUGHT 2 rank 0: ValueError: dtrain.fit: was called in a rank" in said, said
    assert 'under `if __name__ == "__main__":`' in said
    assert f"log: {folder / 'bare' / 'logs' / 'rank-0.log'}" in said
    assert len(list((folder / "bare" / "logs").glob("rank-*"))) == 1


UNDER_MAIN = """
import dtrain
import torch
from torch import nn

def points():
    return torch.ones(64, 2), torch.ones(64, 2)

def warm(step, steps):
    return min(1.0, (step + 1) / length)

def cold(step, steps):
    return 1.0

if __name__ == "__main__":
    length = 5
    class Net(nn.Module):
        def forward(self, x):
            return x
    for given in ({"model": Net}, {"schedule": warm}, {"schedule": cold(0, 9)}):
        try:
            dtrain.fit(**{"data": points, **given})
        except ValueError as error:
            print(error)
    dtrain.fit(data=points, strategy="fsp")
"""


def test_what_stands_in_the_block_that_ranks_do_not_run_is_refused(folder: Path) -> None:
    (folder / "guarded.py").write_text(UNDER_MAIN)
    process = python("guarded.py")
    said = process.communicate(timeout=patience(60))[0].splitlines()
    assert process.returncode == 2 and said[-2] == "ValueError: strategy=fsp: there is no such option"
    assert len([line for line in said if line.startswith("  File ")]) == 1, "the line of the script, and none of ours"
    block = 'under `if __name__ == "__main__":` (guarded.py:%d), which the ranks do not run'
    assert said[0] == f"model=Net: stands {block % 17}" and said[1].startswith("  fix: move Net above that block")
    assert said[2] == f"schedule=warm: uses length, which is set {block % 16}"
    assert said[3].startswith("  fix: move length above that block")
    assert said[4] == "schedule=1: is a number, not a function or an option" and "=my_schedule" in said[5]


ASKS = """
import functools
from logged import logged

@logged
def decorated():
    return 1

def asking():
    return args if __name__ == "__main__" else 1

def looking():
    return args if "args" in globals() else 1

def wrong():
    return args

if __name__ == "__main__":
    log, args = 3, 4
"""
LOGGED = """
import functools
log = print

def logged(function):
    @functools.wraps(function)
    def inner():
        log("made")
        return function()
    return inner
"""


def test_what_ranks_never_use_of_that_block_is_no_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "logged.py").write_text(LOGGED)
    (folder / "asks.py").write_text(ASKS)
    script: Any = types.ModuleType("__main__")
    script.__file__ = str(folder / "asks.py")
    exec(ASKS, vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    for function in (script.decorated, script.asking, script.looking):
        python_objects.check_outside_main("data", function)
    with pytest.raises(ValueError, match="wrong: uses args"):
        python_objects.check_outside_main("data", script.wrong)


def test_ctrl_c_saves_and_ends_the_script_with_75(folder: Path) -> None:
    (folder / "long.py").write_text(
        "import dtrain\n"
        "if __name__ == '__main__':\n"
        "    sizes = {'num_layers': 1, 'dim': 16, 'num_heads': 2, 'seq_len': 8}\n"
        "    dtrain.fit(('gpt2-tiny', sizes), 'synthetic', processes=1, run_dir='long', train={'steps': 10**6})\n"
        "    print('AFTER')\n"
    )
    # a shell's background job ignores Ctrl-C, and so would all that it starts: these tests may be one
    default_sigint = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = python("long.py", start_new_session=True, preexec_fn=default_sigint)
    deadline = time.monotonic() + 90
    while not losses(folder / "long") and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=patience(90))[0]
    assert process.returncode == 75, said
    assert summary(folder / "long")["status"] == "preempted" and "AFTER" not in said
    assert (folder / "long" / "checkpoints" / "latest").exists()


# ---- nothing is started --------------------------------------------------------------------------------------


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders: list[Path] = []
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: folders.append(run_dir) or 0)
    return folders


def test_a_process_of_torchs_spawn_is_not_the_place(started: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "_target", spawn._wrap, raising=False)
    with pytest.raises(ValueError, match=r"torch.multiprocessing.spawn.*\n  fix: one call outside of it"):
        dtrain.fit("gpt2-tiny")
    assert not started


def config_of(result: dtrain.Result) -> Any:
    return OmegaConf.to_container(OmegaConf.load(result.run_dir / "config.yaml"))


def test_every_way_to_say_a_thing(started: list[Path]) -> None:
    from net import Net, rings

    result = dtrain.fit(
        (functools.partial(Net, dim=8), {"depth": 2}), rings, loss="mse", strategy=("fsdp", {"offload": "cpu"}),
        optim=("adamw", {"lr": 1e-4, "betas": (0.8, 0.9)}), train={"steps": np.int64(7), "max_grad_norm": None},
        processes=4, name="it's a, test=1", deterministic=False, **{"train.seed": 3, "checkpoint.every": 5},
    )  # fmt: skip
    config = config_of(result)
    assert config["model"] == {"_target_": "net.Net", "dim": 8, "depth": 2}
    assert config["data"] == {"_target_": "net.rings"} and config["trust"] == ["net"]
    assert config["strategy"]["offload"] == "cpu" and config["loss"]["_target_"] == "dtrain.models.losses.mse"
    assert config["optim"]["lr"] == 1e-4 and config["optim"]["betas"] == [0.8, 0.9]
    assert config["train"] | {"steps": 7, "max_grad_norm": None, "seed": 3} == config["train"]
    assert config["name"] == "it's a, test=1" and config["cluster"]["processes"] == 4
    assert config["deterministic"] is False and config["checkpoint"]["every"] == 5
    assert result.status == "queued" and result.summary == {}, "nothing has been written yet"
    plain = config_of(dtrain.fit(model="gpt2-tiny", data="synthetic"))
    assert plain["choices"]["model"] == "gpt2-tiny" and plain["trust"] == []


def test_a_typed_name_is_trusted_and_a_run_folders_is_not(
    started: list[Path], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = ["model=net.Net", "model.dim=8", "data=net.rings", "loss=net.focal", "trust=[json]"]
    assert main(["launch", *words, "run_dir=typed"]) == 0
    assert OmegaConf.load("typed/config.yaml").trust == ["json", "net"]
    assert main(["launch", "resume=typed"]) == 2
    assert "fix: data=net.rings loss=net.focal model=net.Net, or 'trust=[net]'" in capsys.readouterr().err
    assert main(["launch", "resume=typed", "trust=[net]", "strategy=fsdp"]) == 0, "with every setting as it was"
    assert main(["launch", "resume=typed", "model=net.Net", "model.dim=9", "trust=[net]"]) == 2
    assert "model.dim: 8 → 9" in capsys.readouterr().err
    assert len(started) == 2


def test_a_library_function_is_a_loss(started: list[Path]) -> None:
    from net import Net, rings
    from torch.nn import CrossEntropyLoss, functional

    one = config_of(dtrain.fit((Net, {"dim": 8}), rings, loss=functional.l1_loss, run_dir="l1"))
    assert one["loss"] == {"_target_": "torch.nn.functional.l1_loss", "_partial_": True}
    two = config_of(dtrain.fit((Net, {"dim": 8}), rings, loss=(CrossEntropyLoss, {"label_smoothing": 0.1})))
    assert two["loss"]["_target_"] == "torch.nn.modules.loss.CrossEntropyLoss"


class Outer:
    class Inner: ...


class Sized:
    def __init__(self, hidden: int = 32) -> None: ...


class Needs:
    def __init__(self, dim: int) -> None: ...


make_sized = lambda: Sized(8)  # noqa: E731
ADAM = torch.optim.Adam([torch.zeros(1)], lr=0.1)


def closure() -> Any:
    class Local: ...

    return Local


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"model": Outer()},
            r"model=<Outer>: is an object of this process.*\n  fix: model=tests\.test_fit\.Outer; or def my_model\(\)",
        ),
        ({"model": Sized()}, r'with arguments model=\(tests\.test_fit\.Sized, {"hidden": 32}\); or def my_model'),
        (
            {"model": Needs(3)},
            r'fix: def my_model\(\): return Needs\(…\).*model=\(tests\.test_fit\.Needs, {"dim": …}\)',
        ),
        (
            {"data": torch.utils.data.DataLoader([1])},
            r"fix: def my_data\(\): return DataLoader\(…\) at the top level of the file, and data=my_data$",
        ),
        (
            {"optim": ADAM},
            r'optim=<Adam>: is an object of this process.*\n  fix: .*\(torch\.optim\.Adam, {"lr": 0\.1}\)',
        ),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR(ADAM, 3)},
            r'schedule=<StepLR>: is an object.*\n  fix: schedule="step"',
        ),
        (
            {"loss": torch.nn.CrossEntropyLoss(torch.ones(3))},
            r"loss=<CrossEntropyLoss>.*\n  fix: def my_loss\(outputs, targets\)",
        ),
        (
            {"model": lambda: None},
            r"model=lambda: has no name.*\n  fix: def my_model\(\): return None at the top level",
        ),
        ({"model": lambda: Sized(hidden=64)}, r'\n  fix: model=\(Sized, {"hidden": 64}\)$'),
        (
            {"model": make_sized},
            r"fix: def make_sized\(\): return Sized\(8\) at the top level of the file, and model=m",
        ),
        (
            {"schedule": lambda step, steps: 1 - step / steps},
            r"schedule=lambda: .*\n  fix: def my_schedule\(step, steps\): return 1 - step / steps at the top level",
        ),
        ({"device": "cuda"}, r"device: there is no such setting\n  fix: leave out device; a GPU is used wherever"),
        ({"model": Outer.Inner}, r"model=Outer\.Inner: is not at the top level"),
        ({"data": closure()}, r"data=closure\.<locals>\.Local: is not at the top level"),
        ({"model": int}, r"model=int: the ranks cannot import it as builtins\.int"),
        (
            {"model": functools.partial(closure, 1, 2)},
            r"every setting needs a name, but these positional arguments have none",
        ),
        ({"model": (Outer, {"act": max})}, r"model\.act=<builtin_function_or_method>: a configuration can hold only"),
        ({"model": (Outer, {3: 1})}, r"model=\{3: …\}: a setting's name must be text"),
        (
            {"model": Outer},
            r"which .* does not have; data= is not given, .*\n  fix: data=.*; for tokens, data={\"seq_len\": 128}",
        ),
        ({"model": (Outer, {"dim": 3}), "data": Outer}, r"model\.dim: there is no such setting"),
        ({"train": {"stpes": 3}}, r"train\.stpes: there is no such setting\n  fix: did you mean steps=3\?"),
        ({"train": {"steps": "ten"}}, r"train\.steps=ten: must be a whole number"),
        ({"strategy": "fdsp"}, r"strategy=fdsp: there is no such option\n  fix: did you mean strategy=\"fsdp\""),
        ({"strategy": "fsdp,ddp"}, r"is more than one value"),
        (
            {"steps": 4, "train": {"steps": 5}},
            r"train\.steps=5: has two values.*\n  fix: leave out steps=, or train\.steps",
        ),
        (
            {"loss": torch.nn.MSELoss()},
            r"loss=<MSELoss>: is an object.*\n  fix: give the class: loss=torch\.nn\.MSELoss;",
        ),
        ({"loss": 3}, r"loss=3: there is no such option\n  fix: loss can be"),
        (
            {"precision": 16},
            r"precision=16: there is no such option\n  fix: precision=\"fp16\", or precision=\"bf16\";",
        ),
        ({"processes": 5}, r"train\.global_batch_size=32: must be a multiple of the 5"),
        ({"-m": 1}, r"'-m': is not the name of a setting"),
        ({"resume": "no-such-run"}, r"no-such-run"),
        ({"data": "my.thing"}, r"data=my\.thing: there is no module my"),
        ({"wandb_api_key": "x"}, r"looks like a secret"),
    ],
)
def test_a_mistake_is_a_value_error_before_anything_starts(
    given: dict[str, Any], told: str, started: list[Path], folder: Path
) -> None:
    before = set(folder.rglob("*"))
    with pytest.raises(ValueError, match=told):
        dtrain.fit(**given)
    assert not started and {p for p in folder.rglob("*") if "pycache" not in str(p)} <= before


def test_what_is_typed_in_a_session_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(Outer, "__module__", "__main__")
    monkeypatch.setattr(main, "Outer", Outer, raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    for file in ("<stdin>", None):
        monkeypatch.setattr(main, "__file__", file, raising=False)
        with pytest.raises(
            ValueError, match=r"model=Outer: was defined in an interactive session.*\n  fix: put it into"
        ):
            python_objects.name_of("model", Outer)


def test_a_class_of_the_script_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(Outer, "__module__", "__main__")
    monkeypatch.setattr(main, "Outer", Outer, raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("script_xyz", "two-words", "json"):
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.setattr(main, "__file__", str(tmp_path / f"{name}.py"), raising=False)
        if name == "script_xyz":
            assert python_objects.name_of("model", Outer) == ("script_xyz.Outer", tmp_path)
        else:
            with pytest.raises(ValueError, match=rf"cannot import it as {name}\.Outer\n  fix: "):
                python_objects.name_of("model", Outer)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script_xyz.py"))
    Path("script_xyz.py").write_text("")
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"would import .*elsewhere/script_xyz\.py as script_xyz"):
        python_objects.name_of("model", Outer)


def test_names_of_things_elsewhere() -> None:
    assert python_objects.name_of("model", OrderedDict) == ("collections.OrderedDict", None)
    assert python_objects.name_of("model", OmegaConf) == ("omegaconf.omegaconf.OmegaConf", None), "installed"
    assert python_objects.name_of("model", block_after) == ("tests.test_fit.block_after", ROOT)


RESERVED = ("null", "true", "false", "inf", "nan")
# a text that begins with ~/ becomes a path in the home folder, as in a shell: it has a test of its own
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"])).filter(lambda text: not re.match("~(/|$)", text))
WORDS = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True).filter(lambda w: w not in RESERVED)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)  # the first call is slow on a busy machine
@given(value=VALUES)
def test_hydra_reads_back_every_value_as_it_was(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={python_objects.value_of('key', value)}")
    assert override.value() == value and type(override.value()) is type(value)


def test_a_path_in_the_home_folder_is_expanded_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/a/home")
    assert python_objects.value_of("key", "~") == "'/a/home'"
    assert python_objects.value_of("key", [Path("~/b"), {"c": "~/d"}]) == "['/a/home/b',{c:'/a/home/d'}]"
    assert python_objects.value_of("key", ["~e", "f/~"]) == "['~e','f/~']"


def test_the_same_call_in_a_rank_or_in_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[str] = []

    def call() -> None:
        try:
            dtrain.fit()
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    call()
    assert "main thread" in caught[0] and "in a rank" in caught[1] and all("\n  fix: " in text for text in caught)


def test_importing_dtrain_is_cheap() -> None:
    code = "import dtrain, sys; print(sorted({'torch', 'hydra', 'omegaconf', 'rich'} & sys.modules.keys()))"
    assert python("-c", code).communicate()[0].strip() == "[]"
    assert dtrain.fit.__module__ == "dtrain.api"
    with pytest.raises(AttributeError, match="fitt"):
        dtrain.fitt  # noqa: B018
