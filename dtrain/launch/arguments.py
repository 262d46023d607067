"""Rewrite the command line for Hydra. Each kind of argument has its own module; the order of the steps is here."""

from __future__ import annotations

import difflib
import itertools
import re
from pathlib import Path

from hydra.core.config_store import ConfigStore

from dtrain.config.files import GROUPS, SECRET, SEVERAL, known_settings, options_of
from dtrain.config.hydra_errors import is_list
from dtrain.config.redaction import check_arguments
from dtrain.config.spelling import check_spelling
from dtrain.config.unknown_settings import is_foreign, unknown_setting
from dtrain.errors import bad
from dtrain.launch.options import AUTO, STAND_IN, named, no_option, no_such_option, store_option
from dtrain.launch.quoting import check_path, quote, unquoted
from dtrain.launch.recipes import built_in, store_recipe, store_recipes
from dtrain.launch.resume_arguments import forked, resumed
from dtrain.launch.script_arguments import check_loose, script_overrides
from dtrain.launch.user_code import offer_own, with_trust

# A value that Hydra does not read as text.
NOT_TEXT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|true|false|nan|[+-]?inf", re.IGNORECASE)


def check_dashes(word: str, following: str) -> None:
    """Refuse a setting that is typed like an option."""
    name, _, value = word.lstrip("-").partition("=")
    value = value or ("" if following.startswith("-") or "=" in following else following)  # --strategy fsdp
    if word.startswith("-") and name in known_settings():
        raise ValueError(f"{word}: settings have no dashes\n  fix: {name}={value or '…'}")
    name = name.replace("-", "_")
    if word.startswith("--") and is_foreign(name):  # --batch-size=32, --epochs 3
        raise ValueError(unknown_setting(name, value).replace(name, word.partition("=")[0], 1))


def prepare_arguments(argv: list[str]) -> list[str]:
    """Turn `--dry-run`, `recipe=FILE`, `resume=RUN` and `fork=RUN` into overrides; leave the rest as typed."""
    check_arguments(argv)
    argv = with_trust(argv)
    argv = ["dry_run=true" if a == "--dry-run" else a for a in argv]
    argv.sort(key=lambda a: a not in ("-m", "--multirun"))  # Hydra accepts -m only before or after all overrides
    ours = "|".join([*GROUPS, "recipe", "resume", "fork", "run_dir"])
    argv = [re.sub(rf"^\++({ours})=", r"\1=", a) for a in argv]  # +strategy=fsdp
    empty = r"^cluster\.(sbatch|fabric\.env|env|resources|node_selector|pod)\b"  # mappings that are empty by default
    argv = [re.sub(empty, r"++\g<0>", a) for a in argv]
    argv = [re.sub(r"^([\w.+]+=)~(?=/|$)", lambda m: m[1] + str(Path.home()), a) for a in argv]  # no shell does it here
    argv = [re.sub(r"^(\++)?logger\.(project|mode)=", r"\1logger.wandb.\2=", a) for a in argv]  # their former names
    check_lists(argv)
    lists = tuple(f"{group}=[" for group in SEVERAL)
    argv = [re.sub(r"\s", "", a) if a.startswith(lists) else a for a in argv]  # logger=[csv, mlflow]
    argv = ["checkpoint.save=false" if a == "checkpoint=none" else a for a in argv]
    argv = [part for a in argv for part in folder_model(a)]
    check_loose(argv, FLAGS)
    argv = script_overrides(argv)
    argv = [a for a in argv if a != "recipe=null"]  # the default; Hydra rejects it as an override
    for word, following in itertools.pairwise([*argv, ""]):
        check_dashes(word, following)
        value = word.partition("=")[2] or ("" if following.startswith("-") or "=" in following else following)
        if word.startswith("-") and (refused := no_flag(word, value)):
            raise refused
    given = {a.split("=", 1)[0]: a.split("=", 1)[1] for a in argv if "=" in a and not a.startswith("-")}
    for key, value in given.items():
        if SECRET.search(key):
            raise bad(
                key,
                "…",
                "looks like a secret, and a configuration is written to disk in several places",
                "give it in an environment variable",
            )
        several = key in SEVERAL and re.fullmatch(r"\[[\w.-]+(,[\w.-]+)*\]", value)
        if key in GROUPS and re.search(r"^(null)?$|[\[\]]|\.\.|\.ya?ml$", value) and not several:
            raise no_option(key, value)
        if key in GROUPS and value not in options_of(key):
            check_spelling(key, value)
            if plain := next((part for part in named(value) if NOT_TEXT.fullmatch(part)), None):
                raise no_such_option(key, plain)  # Hydra's message does not name the group
    argv = offer_own(argv)
    # an option stored by an earlier launch in this process must not leak into this one: strategy=glob(*) would match it
    ConfigStore.instance().repo.get("strategy", {}).pop(f"{AUTO}.yaml", None)
    if re.search(rf"\b{AUTO}\b", given.get("strategy", "")):
        store_option("strategy", AUTO, STAND_IN)
    if "run_dir" in given and {"-m", "--multirun"} & set(argv):
        fix = f"hydra.sweep.dir={given['run_dir']}"
        raise bad("run_dir", given["run_dir"], "a sweep makes a folder for each job, in hydra.sweep.dir", fix)
    if any(a.startswith("-") and a not in ("-m", "--multirun") for a in argv):  # --help lists them
        store_recipes()
    elif "recipe" in given:
        store_recipes(given["recipe"])
    is_file = re.search(r"[/\\]|\.ya?ml$", given.get("recipe", "")) and given["recipe"] not in built_in()
    if is_file and not ({"-m", "--multirun"} & set(argv) and re.search(r"[,(]", given["recipe"])):  # a sweep: tiny/a,b
        path = Path(given["recipe"]).expanduser()
        if path.is_dir():
            raise bad("recipe", given["recipe"], "is a folder, not a file", "dtrain recipes ls shows the built-in ones")
        if not path.is_file():
            raise bad("recipe", given["recipe"], "there is no such file", "dtrain recipes ls shows the built-in ones")
        store_recipe(path)
        argv = [f"recipe={path.stem}" if a == f"recipe={given['recipe']}" else a for a in argv]
    if given.get("resume", "null") != "null":
        others = [*(["recipe="] if "recipe" in given else []), *(a for a in argv if a in ("-m", "--multirun"))]
        if others:
            rule = "a run resumes with its own configuration, one run at a time"
            raise bad("resume", given["resume"], rule, f"leave out {' and '.join(others)}")
        argv = resumed(argv, given)
    elif given.get("fork", "null") != "null":
        argv = forked(argv, given)
    if {"-m", "--multirun"} & set(argv) and "hydra.sweep.dir" not in given:
        from dtrain.launch import sweeps

        if folder := sweeps.earlier(argv):
            check_path("hydra.sweep.dir", folder)
            argv = [*argv, f"hydra.sweep.dir={quote(folder)}"]
            print(
                f"resuming {folder}, which was started with the same overrides (for a new one: hydra.sweep.dir=FOLDER)"
            )
    if {"-m", "--multirun"} & set(argv):  # overrides that all points share do not belong into folder names
        typed = {k.lstrip("+"): v for k, _, v in (a.partition("=") for a in argv if "=" in a and not a.startswith("-"))}
        fixed = [k for k, v in typed.items() if re.fullmatch(r"[^,(]*|\[[^(]*\]", v) and not k.startswith("hydra.")]
        fixed = list(dict.fromkeys([*fixed, "trust"]))
        argv = [*argv, f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]
    return argv


def check_lists(argv: list[str]) -> None:
    """Explain a list whose commas are missing, or that the shell divided at its spaces."""
    for index, word in enumerate(argv):
        found = re.fullmatch(r"\+*([\w.]+)=(\[?)([^\[\]'\"]*)", word)
        if found and found[2]:  # hooks=[a, b] without quotes: two words
            rest = list(itertools.takewhile(lambda part: not re.search(r"[=\[]", part), argv[index + 1 :]))
            end = next((n for n, part in enumerate(rest, 1) if part.endswith("]")), 0)
            if end:
                whole = " ".join([found[3], *rest[:end]]).removesuffix("]")
                items = ",".join(part for part in re.split(r"[,\s]+", whole) if part)
                rule = "the shell divides it at its spaces"
                raise ValueError(f"{found[1]}=[{whole}]: {rule}\n  fix: '{found[1]}=[{items}]'")
        listed = re.fullmatch(r"\+*([\w.]+)=\[?([^\[\]'\",=]*[^\[\]'\"=]*)\]?", word)
        if listed is None or listed[1].startswith(("cluster.", "script")):  # shell lines have spaces
            continue
        key, parts = listed[1], [item.strip() for item in listed[2].split(",")]
        takes_list = key in SEVERAL or (is_list(key) and "[" in word)
        if takes_list and any(re.search(r"\S\s+\S", item) for item in parts):
            values = ",".join(part for item in parts for part in item.split())
            rule = "has names without a comma between them" if key in SEVERAL else "has values without a comma"
            raise bad(key, word.partition("=")[2], rule, f"'{key}=[{values}]'")


# Hydra's own, of which argparse also takes the beginning
FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info", "--trust",
    "-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i",
)  # fmt: skip
# of other programs: what to type here for a flag that is not named as a setting elsewhere
FOREIGN_FLAGS = {
    "recipe=FILE.yaml": ("--config", "--config-file", "--config_file", "--yaml", "--conf", "-f"),
    "cluster.processes=2": ("-n", "-np", "-j", "--np", "--num-proc"),
    "cluster=slurm cluster.nodes=2": ("-N", "--nodes", "--hostfile", "--host_file", "-H", "--hosts", "--machine_rank"),
    "cluster.partition=…": ("--partition",),
    "dry_run=true": ("--dryrun", "--dry_run", "--debug"),
    "dtrain launch …, which starts the ranks itself": (
        "--rdzv_backend", "--rdzv-backend", "--rdzv_endpoint", "--rdzv-endpoint", "--rdzv_id", "--rdzv-id",
        "--master_port", "--master-port", "--master_addr", "--master-addr", "--standalone", "--node_rank",
        "--node-rank", "--local_rank", "--main_process_port", "--main_process_ip", "--multi_gpu",
    ),
}  # fmt: skip


def no_flag(word: str, value: str) -> ValueError | None:
    """Explain a flag that Hydra does not have: what other programs mean by it, or the setting of that name."""
    flag = word.partition("=")[0]
    if flag == "--" or flag in FLAGS or (flag.startswith("--") and sum(known.startswith(flag) for known in FLAGS) == 1):
        return None
    fix = next((ours for ours, theirs in FOREIGN_FLAGS.items() if flag in theirs), None)
    if fix is not None:
        if fix.startswith("recipe=") and re.search(r"\.ya?ml$", value):
            fix = f"recipe={value}"
        elif fix.endswith("=2") and value.isdecimal():
            fix = f"{fix.removesuffix('2')}{value}"
        fix = f"leave out {flag}: {fix}" if fix.startswith("dtrain launch") else fix
        return ValueError(f"{flag}: there is no such option\n  fix: {fix}")
    if not flag.startswith("--"):
        return ValueError(f"{flag}: there is no such option\n  fix: key=value; dtrain launch --help lists the settings")
    if near := difflib.get_close_matches(flag, ("--help", "--multirun", "--dry-run"), 1, 0.7):  # not Hydra's others
        fix = "dtrain launch --help" if near[0] == "--help" else near[0]
        return ValueError(f"{flag}: there is no such option\n  fix: {fix}")
    name = flag.lstrip("-").replace("-", "_")
    text = unknown_setting(name, value).replace(f"leave out {name}", f"leave out {flag}")
    return ValueError(text.replace(name, flag, 1))


def folder_model(word: str) -> list[str]:
    """Turn `model=hf:FOLDER` into the option and its setting."""
    found = re.fullmatch(r"model=hf:(.+)", word)
    if found is None:
        return [word]
    folder = Path(unquoted(found[1])).expanduser().absolute()
    if not (folder / "config.json").is_file():
        rule = "has no config.json" if folder.is_dir() else "is not a folder here, and dtrain downloads nothing"
        fix = "the folder that save_pretrained() or `dtrain export RUN OUT --format hf` wrote"
        raise bad("model", f"hf:{found[1]}", rule, fix)
    return ["model=hf", f"model.path={quote(folder)}"]
