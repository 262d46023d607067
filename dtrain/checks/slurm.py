"""Checks of SLURM settings before they become a script, and explanations of SLURM's own rejections."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from dtrain.config.files import CONTROL, SECRET
from dtrain.config.redaction import check as check_values
from dtrain.errors import bad

# sbatch parameters that dtrain depends on; users may not override them
NOT_THEIRS = ("array", "output", "error", "job-name", "open-mode", "wrap", "chdir", "signal", "requeue", "no-requeue",
              "wait", "test-only", "parsable", "quiet", "ignore-pbs", "export-file", "uid", "gid")  # fmt: skip
# sbatch's error messages → the setting at fault
REFUSALS = (
    (r"invalid partition|partition.*not available|user's group not permitted", "partition", "sinfo -s lists them"),
    (r"invalid account|account/partition", "account", "sacctmgr show associations user=$USER lists yours"),
    (r"invalid qos", "qos", "sacctmgr show qos lists them"),
    (r"invalid feature|constraint", "constraint", "sinfo -o '%N %f' lists the nodes' features"),
    (r"reservation", "reservation", "scontrol show reservation lists them"),
    (
        r"invalid generic resource|gres",
        "gres",
        "sinfo -o '%N %G' shows what nodes have; cluster.gpus_per_node=0 for none",
    ),
    (r"time limit|invalid time", "time", "sinfo -o '%P %l' shows the partitions' limits"),
    (r"invalid node name|node.*not.*partition", "nodelist exclude", "sinfo -N lists the nodes"),
    (r"node count|node configuration|more processors", "nodes", "sinfo -o '%P %D %c %m %G' shows the available nodes"),
)
# sbatch finds no configuration of SLURM, or no controller answers; sinfo would fail, too
UNREACHABLE = re.compile(
    r"establish a configuration source|unable to contact slurm|slurm_load_ctl_conf|unable to process configuration file"
    r"|could not find slurm\.conf|unable to find.*slurm\.conf",
    re.IGNORECASE,
)
ASKED = ("gpus_per_node", "gres", "mem", "cpus_per_task", "constraint", "nodelist", "exclude")  # requests per node
OWN_NAMES = (
    "nodes", "processes", "time", "partition", "account", "qos", "exclusive", "reservation", "mail_type", "mail_user",
    *ASKED,
)  # fmt: skip


def minutes(time: str | int | None, grace_s: int) -> int | None:
    """Parse SLURM's formats of a time limit: 90, 90:00, 12:00:00, 2-12, 2-12:30, 2-12:30:00."""
    if time is None:
        return None
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time))
    if not parts:
        raise bad("cluster.time", time, "must be in SLURM's format: minutes, H:M:S or D-H:M:S", "cluster.time=12:00:00")
    days, first, second, third = (int(p) if p else None for p in parts.groups())
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    if seconds <= grace_s:
        rule = f"must be longer than cluster.grace_s={grace_s} seconds, the time reserved for saving"
        raise bad("cluster.time", time, rule, f"cluster.time={grace_s // 60 + 10}, or a smaller cluster.grace_s")
    return -(-seconds // 60)


def check_extra(sbatch: dict[str, Any]) -> None:
    """Check cluster.sbatch: parameters without a setting of their own."""
    for name, value in sbatch.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", str(name)):
            raise bad("cluster.sbatch", name, "must be the long name of an sbatch option", "e.g. {nice: 100}")
        if name in NOT_THEIRS:
            raise bad("cluster.sbatch", name, "is set by dtrain and cannot be overridden", "leave it out")
        own = str(name).replace("-", "_").replace("ntasks_per_node", "processes")
        if own in OWN_NAMES:  # the script would use the second value, unknown to dtrain
            raise bad("cluster.sbatch", name, "has a setting of its own", f"cluster.{own}={value}")
        if value is not True and (isinstance(value, bool) or not isinstance(value, (str, int, float))):
            rule = "must be text, a number, or true for an option without a value"
            raise bad(f"cluster.sbatch.{name}", value, rule, "leave it out to turn it off")


def check_commands(python: str | None, srun: list[str]) -> None:
    try:
        shlex.split(python or "")
    except ValueError as error:
        raise bad(
            "cluster.python", python, f"is not a valid command line ({error})", "cluster.python=/path/to/python"
        ) from None
    for word in srun:
        if not word.startswith("-"):  # srun would run this word instead of Python
            rule = "must be a list of options, each with its value"
            raise bad("cluster.srun", word, rule, "'cluster.srun=[\"--cpu-bind=verbose\"]'")


def check_secrets(texts: list[str]) -> None:
    for text in texts:
        for name in re.findall(r"([A-Za-z_][\w-]*)=", text):
            if SECRET.search(name):
                raise bad(
                    "cluster", f"{name}=…", "looks like a secret, and other users can read job scripts",
                    "export it in your shell before you launch: the job gets your environment",
                )  # fmt: skip


def check_texts(texts: dict[str, Any], folder: Path, import_path: str) -> None:
    """Reject what quoting cannot protect: SLURM parses the #SBATCH lines itself; bash sees only comments."""
    check_values({**texts, "run_dir": str(folder)})  # job names and log paths are readable by others
    for key, value in texts.items():
        if isinstance(value, str) and "\\" in value:
            raise bad(key, value, "SLURM treats a backslash as an escape, even inside quotes", "leave it out")
    if found := re.search(r"[%\\]", str(folder)):
        rule = f"SLURM expands {found[0]} in the names of log files"
        raise bad("run_dir", folder.parent.parent, rule, f"choose a run_dir without {found[0]} in its path")
    for path in (str(folder), import_path):
        if CONTROL.search(path):  # from the working folder; the other settings are already checked
            rule = "has a control character, which would end up in a shell script"
            raise bad("run_dir", repr(path), rule, "work in a folder without one in its path")


def refused(answer: str, parameters: dict[str, Any]) -> ValueError:
    text = " ".join(re.sub(r"(sbatch|allocation): (error|failure): ", "", line) for line in answer.split("\n") if line)
    if UNREACHABLE.search(text):
        last = re.sub(r"^\w+: (error|fatal): ", "", [line for line in answer.split("\n") if line.strip()][-1])
        fix = "cluster=local, or launch on a login node of the cluster; dry_run=true shows the script"
        return ValueError(f"cluster: no SLURM is reachable from this machine (sbatch: {last.strip()})\n  fix: {fix}")
    option = re.search(r"invalid --([a-z-]+) specification|option '--([a-z-]+)", text, re.IGNORECASE)
    if option:
        name = option[1] or option[2]
        own = name.replace("-", "_")
        setting, value = (own, parameters.get(own)) if own in OWN_NAMES else (f"sbatch.{name}", parameters.get(name))
        return bad(f"cluster.{setting}", value, f"SLURM refuses it: {text}", f"`man sbatch` says what --{name} takes")
    for pattern, settings, fix in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            setting = next((s for s in settings.split() if parameters.get(s) is not None), settings.split()[0])
            asked = ", ".join(
                f"{name}={parameters[name]}" for name in ASKED if setting == "nodes" and name in parameters
            )
            text += f" (with {asked})" if asked else ""
            return bad(f"cluster.{setting}", parameters.get(setting), f"SLURM refuses it: {text}", fix)
    return ValueError(
        f"cluster: SLURM refuses the job: {text}\n  fix: dry_run=true shows the script; sinfo the available nodes"
    )
