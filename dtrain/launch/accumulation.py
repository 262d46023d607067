"""Answer gradient_accumulation_steps=4, as other programs have it, with the batch sizes of this run."""

from __future__ import annotations

import itertools
import re

from dtrain.config.files import GROUPS
from dtrain.config.hardware import ranks_per_node
from dtrain.config.hydra_errors import MISTAKES
from dtrain.config.mesh import of_strategy
from dtrain.errors import OTHERWISE, foreign
from dtrain.launch.compose import plain_config
from dtrain.launch.options import AUTO
from dtrain.util.format import counted

ACCUMULATION = OTHERWISE["train.micro_batch_size=4"][0].split()


def check_accumulation(argv: list[str]) -> None:
    """Answer gradient_accumulation_steps=4 with the micro-batch that gives so many passes here."""
    for word, following in itertools.pairwise([*argv, ""]):
        name, _, value = word.lstrip("-+").partition("=")
        if name.rpartition(".")[2].replace("-", "_").lower() not in ACCUMULATION:
            continue
        if name.partition(".")[0] in GROUPS:  # model.accumulation_steps=4 may be an argument of the user's own class
            continue
        value = value or (following if word.startswith("-") else "")
        others = [part for part in argv if part is not word and not (part is following and "=" not in word)]
        if value.isdecimal() and int(value) and (fix := accumulating(int(value), others)):
            both = [w for w in argv if fix.startswith("train.micro_batch_size=") and is_batch_size(w)]
            shown = " ".join([*both, word] if both and argv.index(both[0]) < argv.index(word) else [word, *both])
            rule = "there are no such settings" if both else "there is no such setting"
            raise ValueError(f"{shown if both else word.partition('=')[0]}: {rule}\n  fix: {fix}")


def is_batch_size(word: str) -> bool:
    """Is it a name that other programs give the samples that a rank takes at once?"""
    name = word.lstrip("-+").partition("=")[0].replace("-", "_")
    return foreign(name) == "train.micro_batch_size" and name != "train.micro_batch_size"


def accumulating(passes: int, argv: list[str]) -> str:
    """Return the batch sizes that give so many passes a step; "" if the rest of the command is wrong, too."""
    typed = argv  # per_device_train_batch_size=8 beside it
    argv = [re.sub(r"^([\w.]+)=(?=\d+$)", lambda m: f"{foreign(m[1]) or m[1]}=", word) for word in argv]
    try:
        config = plain_config([word for word in argv if not word.startswith("-")])
        train, node_size = config["train"], ranks_per_node(config["cluster"])
        sizes = of_strategy(config["strategy"], config["cluster"]["nodes"] * node_size, node_size)
    except (*MISTAKES, TypeError):
        return ""
    if config["choices"].get("strategy") == AUTO:
        return ""
    total, micro = train["global_batch_size"], train["micro_batch_size"]
    if micro:
        why = f"train.micro_batch_size={micro} × {passes} passes × {counted(sizes.dp, 'data rank')}"
        both = f"train.micro_batch_size={micro} " if argv != typed else ""
        return f"{both}train.global_batch_size={micro * passes * sizes.dp}   ({why})"
    micro = max(1, round(total / sizes.dp / passes))
    batch = micro * passes * sizes.dp
    more = "" if batch == total else f" train.global_batch_size={batch}"
    why = f"train.global_batch_size={batch} / {counted(sizes.dp, 'data rank')} / {passes} passes"
    return f"train.micro_batch_size={micro}{more}   ({why})"
