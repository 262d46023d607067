"""Say what was probably meant by an option that there is not: another program's name, a class of torch, a call."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import re
from pathlib import Path

from dtrain.config.files import GROUPS, HOOKS, options_of, setting_prefix
from dtrain.config.source import source_of
from dtrain.config.source_files import exports
from dtrain.config.source_hints import defined_here, nearest_name
from dtrain.errors import foreign_option
from dtrain.util.format import argument

TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")  # my_pkg.net.Net: the user's own code, as an option


def meant_option(group: str, option: str, options: list[str]) -> str:
    """Return what was probably meant by an option that there is not, up to a list of all options."""
    longer = [o for o in options if option and o.startswith(f"{option.lower()}-")]  # a100: a100-40gb or a100-80gb
    same = next((o for o in options if o == option.lower()), "")
    near = [same] if same else longer[:4] or difflib.get_close_matches(option.lower(), options, 1, 0.6)
    meant = None if same else foreign_option(group, option)
    if of_torch := [name for name in TORCH_OPTIMIZERS if group == "optim" and option.lower() == name.lower()]:
        return f"optim=torch.optim.{of_torch[0]}, or optim={near[0] if near else 'adamw'}; "
    if fix := called(group, option):
        return f"{fix}; "
    if group == "loss" and not (same or meant) and (name := nearest_name(option, torch_losses())):
        return f"loss=torch.nn.{name}; "
    if group == "data" and "/" in option:
        return f"data=text data.path={option}; for folders of images: data=images data.path={option}; "
    if group == "model" and Path(option).is_dir():
        return f"model=hf:{option}; "
    if meant and group == "model" and "/" in option:  # who names the Hub means those weights
        return (
            f"model=hf:FOLDER (that save_pretrained() wrote; nothing is downloaded), or {meant} with random weights; "
        )
    if meant:
        return f"{meant}; "
    if group == HOOKS and not near:
        return "hooks=MODULE.CLASS, a class of yours (docs/your-own.md#hooks); "
    return f"did you mean {' or '.join(f'{group}={o}' for o in near)}? " if near else ""


def called(group: str, text: str) -> str:
    """Return what to type for a call, model=net.Net(dim=32): the arguments are settings. "" if it is none."""
    from dtrain.config.schema import signature

    try:
        call = ast.parse(text.strip("'\""), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    if group not in GROUPS or not isinstance(call, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(call.func)):
        return ""
    target = ast.unparse(call.func)
    if "." not in target and target not in options_of(group):
        target = next(iter(defined_here(target, group)), f"MODULE.{target}")
    names: list[str] = []
    with contextlib.suppress(ValueError):  # there is no such class
        names = [*(signature(target, group, [target.rpartition(".")[0]]) or ())]
    is_function = isinstance(source_of(target), ast.FunctionDef)
    plain = [value for value in call.args if not isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Starred))]
    if len(plain) == len(call.args):  # without what dtrain gives: the parameters; outputs and targets
        names = names[1 if group == "optim" else 2 if group in ("loss", "schedule") and is_function else 0 :]
    pairs = [(names[i] if i < len(names) else "NAME", value) for i, value in enumerate(call.args) if value in plain]
    pairs += [(one.arg, one.value) for one in call.keywords if one.arg]
    prefix = setting_prefix(group, target.rpartition(".")[2])
    return " ".join([f"{group}={target}", *(assigned(f"{prefix}.{name}", value) for name, value in pairs)])


def assigned(key: str, node: ast.expr) -> str:
    """Return a setting with a value that is written in Python, ready to paste."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return f"{key}=…"
    if isinstance(value, str):
        return argument(key, value)
    if isinstance(value, (dict, set, bytes, complex)) or value is ...:
        return f"{key}=…"
    text = json.dumps(value, separators=(",", ":"))
    return f"{key}={text}" if re.fullmatch(r"[\w.+-]*", text) else f"'{key}={text}'"


def torch_losses() -> list[str]:
    return sorted(name for name in exports("torch.nn.modules.loss") or () if name.endswith("Loss") and name[0] != "_")
