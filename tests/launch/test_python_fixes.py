"""The fixes of dtrain.fit are arguments of fit: typed as they are printed, they are accepted."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

import dtrain
from dtrain.errors import ELSEWHERE, OPTIONS_ELSEWHERE
from dtrain.launch.local import Local
from dtrain.launch.python_fixes import in_python
from dtrain.launch.python_objects import spell
from tests.test_bad_inputs import COMPOSE_ONCE

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dim: int = 8):
        super().__init__()

    def forward(self, x):
        return x

class Hook:
    def after_step(self, run):
        pass

class Every:
    def __init__(self, every: int, who: str = "x"):
        self.every, self.who = every, who

    def after_step(self, run):
        pass

class Odd:  # a loss, an optimizer and a hook of which a hint may read no attribute
    buffers, defaults = [1], None

    def __init__(self, rates=torch.zeros(3), size: int = 3):
        self.rates = [1.0]

    @property
    def size(self):
        raise RuntimeError("not yet")

    def __getattr__(self, name):
        raise KeyError(name)

    def begin(self, run):
        pass

class Momentum(torch.optim.SGD):
    def __init__(self, params, lr, beta: float = 0.9):
        super().__init__(params, lr=lr)

def smooth(outputs, targets, smoothing):
    return outputs.mean()

def warm(step, steps, warmup):
    return 1.0

ones = torch.ones(2)

def points():
    return [], []
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Own classes of a file in the current folder; nothing is started."""
    import importlib
    import sys

    (tmp_path / "own_things.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: 0)
    monkeypatch.delitem(sys.modules, "own_things", raising=False)
    module = importlib.import_module("own_things")
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


CALLS = {  # what is typed besides a model, data and a loss, and its fix
    'max_epochs=3, batch_size=16, lr=1e-3': 'epochs=3, train={"global_batch_size": 16}, optim={"lr": 0.001}',
    'max_steps=9': 'steps=9',
    'num_train_epochs=2.5': 'epochs=2.5',
    'trainer={"max_epochs": 3, "precision": "16-mixed"}': 'epochs=3, precision="fp16"',
    'devices=4': 'processes=4',
    'optimizer=torch.optim.Adam': 'optim=torch.optim.Adam',
    'optimizer="AdamW"': 'optim="adamw"',
    'optim=1e-3': 'optim={"lr": 0.001}',
    'optim={"learning_rate": 3e-4, "betas": (0.9, 0.99)}': 'optim={"betas": (0.9, 0.99), "lr": 0.0003}',
    'optim=("adamw", {"learning_rate": 3e-4})': 'optim=("adamw", {"lr": 0.0003})',
    'optim=(torch.optim.SGD, 0.1)': 'optim=(torch.optim.SGD, {"lr": 0.1})',
    'patience=4': 'hooks=("early_stop", {"patience": 4})',
    'callbacks=["EarlyStopping"]': 'hooks="early_stop"',
    'strategy="deepspeed_stage_3_offload"': 'strategy=("zero3", {"offload": "cpu"})',
    'train={"global_batch_size": 33}': 'train={"global_batch_size": 32}',
    '**{"train.global_batch_size": 33}': '**{"train.global_batch_size": 32}',
    'train={"stpes": 5}': 'steps=5',
    'epochs="3"': 'epochs=3',
    'output_dir="kk", save_steps=5, save_total_limit=2': 'run_dir="kk", checkpoint={"every": 5, "keep": 2}',
    'args={"num_train_epochs": 3, "learning_rate": 1e-4}': 'epochs=3, optim={"lr": 0.0001}',
    'deepspeed={"zero_optimization": {"stage": 2}}': 'strategy="zero2"',
    'lr_scheduler=torch.optim.lr_scheduler.StepLR': 'schedule="step"',
    'callbacks=[EarlyStopping()]': 'hooks="early_stop"',
    'strategy=DDPStrategy()': 'strategy="ddp"',
    'strategy=torch.nn.parallel.DistributedDataParallel': 'strategy="ddp"',
    'strategy=torch.nn.DataParallel': 'strategy="ddp"',
    'checkpoint=False': 'checkpoint={"save": False}',
    'optim=("adamw", {"lr": "1e-3"})': 'optim=("adamw", {"lr": 0.001})',
    'logger=["tb"]': 'logger="tensorboard"',
}  # fmt: skip


class EarlyStopping:
    """Like Lightning's."""


class DDPStrategy:
    """Like Lightning's."""


@pytest.mark.parametrize("typed", CALLS)
def test_the_fix_is_accepted_as_it_is_printed(typed: str, own: dict[str, Any]) -> None:
    import torch

    call = 'dtrain.fit(Net, points, loss="cross_entropy", {})'
    names = {"dtrain": dtrain, "torch": torch, "EarlyStopping": EarlyStopping, "DDPStrategy": DDPStrategy, **own}
    with pytest.raises(ValueError, match=r"\n  fix: ") as refused:
        eval(call.format(typed), names)
    fix = str(refused.value).partition("\n  fix: ")[2].removeprefix("did you mean ")
    assert fix.startswith(CALLS[typed]), refused.value
    assert eval(call.format(CALLS[typed]), names).status == "queued"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("mdoel=Net", "model=Net"),
        ("train_data=points", "data=points"),
        ("Net, train_dataset=points, eval_dataset=points", "def my_data(): return points(), points() at the top level"),
        ("Net, points, eval_dataset=points", "leave out eval_dataset; data= gives both splits"),
        ("Net, points, callbacks=[Hook]", "hooks=[Hook]"),
        ("Net, points, callbacks=[Hook()]", "give the class: hooks=own_things.Hook"),
        ("Net, points, criterion=nn.CrossEntropyLoss()", "give the class: loss=torch.nn.CrossEntropyLoss;"),
        ("(Net, 3), points", 'model=(own_things.Net, {"dim": 3})'),
        ("[Net], points", "model=own_things.Net"),
        ("Net, points, optim=Momentum", 'optim=(own_things.Momentum, {"lr": …})'),
        ('Net, points, optim="own_things.Momentum"', 'optim=("own_things.Momentum", {"lr": …})'),
        (
            'Net, points, optim=(Momentum, {"lr": 0.1, "bta": 3})',
            'did you mean optim=(own_things.Momentum, {"lr": 0.1, "beta": 3})?',
        ),
        ("Net, points, loss=smooth", 'loss=(own_things.smooth, {"smoothing": …})'),
        ("Net, points, schedule=warm", 'schedule=(own_things.warm, {"warmup": …})'),
        ('Net, points, optimizer=(Momentum, {"lr": 0.1})', 'optim=(own_things.Momentum, {"lr": 0.1})'),
        ('Net, points, optimizer=("sgd", {"lr": 0.1})', 'optim=("sgd", {"lr": 0.1})'),
        ("Net, points, optimizer=functools.partial(Momentum, lr=0.1)", 'optim=(own_things.Momentum, {"lr": 0.1})'),
        (
            'Net, points, callbacks=[Hook, (Every, {"every": 2})]',
            'hooks=[own_things.Hook, (own_things.Every, {"every": 2})]',
        ),
        (
            'Net, points, hooks=[Hook, (Every, {"evry": 2})]',
            'did you mean hooks=[own_things.Hook, (own_things.Every, {"every": 2})]?',
        ),
        ('Net, points, hooks=(Every, {"who": "y"})', 'hooks=(own_things.Every, {"who": "y", "every": …})'),
        ("Net, points, hooks=[Hook, Every]", 'hooks=[own_things.Hook, (own_things.Every, {"every": …})]'),
        ("Net, points, hooks=[Hook(), Every(4)]", 'hooks=[own_things.Hook, (own_things.Every, {"every": 4})]'),
        (
            'Net, points, hooks=[Hook, Every(4, who="y")]',
            'hooks=[own_things.Hook, (own_things.Every, {"every": 4, "who": "y"})]',
        ),
        ("Net, points, callbacks=[Hook(), Every(4)]", 'hooks=[own_things.Hook, (own_things.Every, {"every": 4})]'),
        ("Net, points, hooks=Every(4)", 'give the class: hooks=(own_things.Every, {"every": 4})'),
        ("Net, points, hooks=[Hook(), Odd()]", 'hooks=[own_things.Hook, (own_things.Odd, {"rates": [1.0]})]'),
        (
            "Net, points, loss=Odd()",
            'give the class: loss=own_things.Odd; with settings: loss=(own_things.Odd, {"setting": 1})',
        ),
        (
            "Net, points, optim=Odd()",
            'give the class: optim=own_things.Odd; with settings: optim=(own_things.Odd, {"setting": 1})',
        ),
        ("Net, points, schedule=warm(0, 9, 5)", "give the function, without calling it: schedule=my_schedule"),
        ("Net, points, loss=smooth(ones, ones, 1)", "give the function, without calling it: loss=my_loss"),
        ("Net, points, dim=4", 'model=(own_things.Net, {"dim": 4})'),
        ('(Net, {"dmi": 4}), points', 'did you mean model=(own_things.Net, {"dim": 4})?'),
        ("Net, points, resume=True", 'resume="latest"'),
        ('{"model": Net, "data": points}', "two stars before it: dtrain.fit(**settings)"),
    ],
)
def test_objects_in_the_wrong_place(typed: str, fix: str, own: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="\n  fix: ") as refused:
        eval(f"dtrain.fit({typed})", {**own, "dtrain": dtrain, "nn": nn, "optim": optim, "functools": functools})
    assert [frame.name for frame in refused.traceback][-1] == "fit"  # no line of dtrain's own below it
    found = str(refused.value).partition("\n  fix: ")[2]
    assert found.replace("own_things.", "").startswith(fix.replace("own_things.", "")), refused.value


def test_each_option_elsewhere_becomes_an_argument() -> None:
    given = functools.partial(dict, model=None)
    for fix in [fix for table in OPTIONS_ELSEWHERE.values() for fix in table]:
        spelled = in_python(f"x: is wrong\n  fix: {fix}; and text", given()).partition("\n  fix: ")[2]
        assert spelled.endswith("; and text")
        eval(f"dict({spelled.partition('; ')[0]})")
    for name in ELSEWHERE:
        eval(f"dict({in_python(f'x: y{chr(10)}  fix: {name}=3', {}).partition('fix: ')[2]})")


@pytest.mark.parametrize(
    ("fix", "told"),
    [
        ("dtrain evaluate data=text, or optim.lr=3", 'dtrain evaluate data=text, or optim={"lr": 3}'),
        ("leave out data=, or another model", "leave out data=, or another model"),
        ("strategy=ddp, or -m strategy=ddp,fsdp; more", 'strategy="ddp"; more'),
        ("'optim.betas=[0.9,0.95]', or ema.decay=null", 'optim={"betas": [0.9, 0.95]}, or ema={"decay": None}'),
        ("def forward(self, x, data=None): ...", "def forward(self, x, data=None): ..."),
        ("export HF_HOME=x", "export HF_HOME=x"),
        ("data=text data.path='a b' train.steps=5.", 'data=("text", {"path": "a b"}), steps=5.'),
    ],
)
def test_only_settings_are_respelled(fix: str, told: str) -> None:
    assert in_python(f"x: y\n  fix: {fix}", {}) == f"x: y\n  fix: {told}"


def test_a_class_of_the_script_is_given_without_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module): ...

    monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
    with pytest.raises(ValueError, match=r'model="Net": is the name of a class .*\n  fix: model=Net$'):
        spell({"model": "Net"})
    assert spell({"model": "gpt2-tiny"})[0] == ["model=gpt2-tiny"]


def test_a_models_setting_may_have_the_name_of_a_group() -> None:
    assert spell({"fork": "r", "model": {"loss": "l2"}})[0] == ["fork='r'", "model.loss='l2'"]


def test_names_of_other_programs_in_the_package() -> None:
    with pytest.raises(ImportError, match=r"dtrain has no Trainer\n  fix: dtrain\.fit"):
        from dtrain import Trainer  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match=r"dtrain has no Trainer\n  fix: dtrain\.fit"):
        _ = dtrain.Trainer
    assert not hasattr(dtrain, "nothing") and getattr(dtrain, "Callback", None) is None
    from dtrain import launch

    assert launch.__name__ == "dtrain.launch"


def test_a_call_without_a_model_says_what_it_trains(own: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    dtrain.fit(steps=3)
    assert "dtrain's example trains: gpt2-tiny" in capsys.readouterr().err
    dtrain.fit(own["Net"], own["points"], loss="cross_entropy", steps=3)
    assert "example" not in capsys.readouterr().err
