"""Turn `script=FILE` and `script_args=…` into settings, and choose conf/script.yaml for a launch of a program."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore

from dtrain.config.files import CONF, GROUPS, known_settings, read_yaml
from dtrain.errors import bad
from dtrain.launch.quoting import quote, quoted_list

LAUNCHERS = ("torchrun", "python", "python3", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun")


def arguments_word(args: list[str]) -> str:
    """Return `'script_args=[--lr,1e-3]'`, as it is typed in a shell."""
    plain = not any(re.search(r"[\s,\[\]'\"]", arg) or not arg for arg in args)
    if plain:
        return f"'script_args=[{','.join(args)}]'"
    text = f"script_args={shlex.join(args)}"
    return shlex.quote(text) if re.search(r'["$`!\\]', text) else f'"{text}"'


def check_loose(argv: list[str], flags: Sequence[str]) -> None:
    """Explain a program's arguments beside script=FILE: `train.py --lr 1e-3`, `script='train.py --lr 1e-3'`.

    flags: Hydra's own, which no program gets.
    """
    check_launchers(argv)
    ours = {name.partition(".")[0] for name in known_settings()} | {"recipe"}
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        is_program = name in ("script", "script.path") if equals else bool(re.fullmatch(r"[\w./~-]*\w\.py", word))
        if not (is_program or name in ("script_args", "script.args")):
            continue
        rest = argv[index + 1 :]
        if is_program and any(part.startswith(("script_args=", "script.args=")) for part in rest):
            continue  # what is beside that word is meant for it
        is_ours = [bool(re.match(rf"[+~]*({'|'.join(ours)})\b[\w.]*=", part)) for part in rest]
        loose = [part for part, our_own in zip(rest, is_ours, strict=True) if not our_own]
        is_flag = bool(loose) and (loose[0].partition("=")[0] in flags or loose[0] == "--dry-run")
        is_other = bool(loose) and bool(re.match(r"[+~]|[^-][^=]*=", loose[0]))  # a misspelled setting
        loose = [] if is_flag or is_other else loose
        shown = " ".join([word, *loose])
        typed = value.strip("'\"") if equals else word
        with contextlib.suppress(ValueError):  # a quote that is not closed
            if is_program and not Path(typed).expanduser().is_file() and not {"-m", "--multirun"} & set(argv):
                parts = shlex.split(typed)
                parts = parts[1:] if len(parts) > 1 and Path(parts[0]).name.startswith("python") else parts
                if len(parts) > 1 and (parts[0].endswith(".py") or Path(parts[0]).is_file()):
                    typed, loose = parts[0], [*parts[1:], *loose]
        if not loose:
            continue
        if is_program:
            rule = "is a program with arguments, which have a setting of their own"
            raise ValueError(f"{shown}: {rule}\n  fix: script={typed} {arguments_word(loose)}")
        fix = arguments_word([*points(value, False)[0], *loose])
        raise ValueError(f"{shown}: the shell divides it at its spaces\n  fix: {fix}")


def check_launchers(argv: list[str]) -> None:
    """Explain `torchrun --nproc_per_node=2 train.py --lr 1e-3` behind our own command."""
    program = next((i for i, word in enumerate(argv) if re.fullmatch(r"[\w./~-]*\w\.py", word)), None)
    ours = [word for word in argv[:program] if re.match(r"[a-z]\w*(\.\w+)*=", word)]
    if program is None or not any(word in LAUNCHERS for word in argv[:program]):
        return
    if any(word.startswith("script") for word in ours):
        return
    before, after = " ".join(argv[:program]), argv[program + 1 :]
    count = re.search(r"--?(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus|np|n)[= ](\d+)", before)
    fix = " ".join([*ours, f"script={argv[program]}"]) + (f" cluster.processes={count[1]}" if count else "")
    rule = "dtrain starts the ranks of a program itself"
    arguments = f" {arguments_word(after)}" if after else ""
    raise ValueError(f"{' '.join(argv[: program + 1])}: {rule}\n  fix: {fix}{arguments}")


def script_overrides(argv: list[str]) -> list[str]:
    """Turn `script=FILE` and `script_args=…` into the settings that they stand for, and name the run after the program.

    Arguments stay texts, as typed: Hydra would read 1e-3 as a number, and True as a boolean.
    """
    is_sweep = bool({"-m", "--multirun"} & set(argv))
    given = dict(a.split("=", 1) for a in argv if "=" in a and not a.startswith("-"))
    overrides = []
    for word in argv:
        name, _, value = word.partition("=")
        name = name.lstrip("+")
        if name in ("script", "script.path"):
            if not value or value == "null":
                raise bad("script", value, "must name a program", "script=train.py")
            typed = [part.strip("'\"") for part in (value.split(",") if is_sweep else [value])]
            paths = [Path(part).expanduser().absolute() for part in typed]
            overrides.append(f"script.path={','.join(map(quote, paths))}")
            is_named = "name" in given or "resume" in given or len(paths) > 1
            overrides += [] if is_named else [f"name={quote(paths[0].stem)}"]
        elif name in ("script_args", "script.args"):
            overrides.append(f"script.args={','.join(map(quoted_list, points(value, is_sweep)))}")
        else:
            overrides.append(word)
    return overrides


def points(value: str, is_sweep: bool) -> list[list[str]]:
    """Read the arguments of a program: [--lr,1e-3] or `--lr 1e-3`; in a sweep, several of either, with commas."""
    if re.fullmatch(r"(\[[^\[\]]*\],?)+", value):
        lists = re.findall(r"\[([^\[\]]*)\]", value)
        # [--lr 1e-3] and [--lr=1 --wd=2], but not [--prompt=two words]
        if any(re.match(r"-([^\s=]*\s+\S|\S*\s+-\S)", item.strip()) for text in lists for item in text.split(",")):
            words = [part for text in lists for item in text.split(",") for part in shlex.split(item)]
            raise bad("script_args", value, "has arguments without a comma", arguments_word(words))
        return [[item.strip().strip("'\"") for item in text.split(",") if item.strip()] for text in lists]
    try:
        return [shlex.split(text) for text in (value.split(",") if is_sweep else [value])]
    except ValueError as error:
        raise bad(
            "script_args", value, f"cannot be split into arguments ({error})", "script_args=[--lr,1e-3]"
        ) from None


def check_groups(argv: list[str]) -> None:
    """Reject the groups that only dtrain's training loop has."""
    groups = [next(iter(entry)) for entry in read_yaml(CONF / "script.yaml")["defaults"] if isinstance(entry, dict)]
    for word in argv:
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if (group in GROUPS and group not in groups) or group in ("train", "checkpoint", "guard", "lora"):
            rule = "is a setting of dtrain's own training loop, and script= runs your program instead"
            raise ValueError(f"{word}: {rule}\n  fix: leave it out, or give it to the program: script_args=[…]")


def main_config(argv: list[str]) -> str:
    """Return which file of conf/ these arguments are composed with: that of programs, or that of the training loop."""
    recipe = dict(a.split("=", 1) for a in argv if "=" in a).get("recipe", "")
    stored = ConfigStore.instance().repo.get("recipe", {})
    for folder in recipe.split("/")[:-1]:
        stored = stored.get(folder, {})
    chosen = stored.get(f"{recipe.rpartition('/')[2]}.yaml")
    has_section = chosen is not None and "script" in chosen.node
    if not has_section and not any(re.match(r"\+*script\.", a) for a in argv):
        return "config"
    check_groups(argv)
    return "script"
