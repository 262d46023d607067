"""Checks of Kubernetes settings before they become a manifest."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from dtrain.config.redaction import NAME as SECRET_NAME
from dtrain.errors import bad

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label: names of most objects
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")  # of a Secret
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
MOUNTED = ("/dev/shm", "/etc/dtrain")  # by dtrain itself


def check(cluster: dict[str, Any]) -> None:
    """Reject what Kubernetes would refuse, ignore or misread; also secrets that a manifest would show."""
    if not cluster["image"]:
        rule, fix = "the pods need a container image with dtrain", "cluster.image=NAME:TAG"
        if not cluster["volumes"]:
            rule += ", and share a run folder on a volume"
            fix += " " + volume_for(cluster)
        raise bad("cluster.image", None, rule, f"docker build -f docker/Dockerfile …, then {fix}")
    for key, pattern in (("namespace", LABEL), ("service_account", NAME), ("priority_class", NAME)):
        if cluster[key] is not None and not pattern.fullmatch(str(cluster[key])):
            rule = "must be a name of Kubernetes: small letters, digits and dashes"
            raise bad(f"cluster.{key}", cluster[key], rule, f"cluster.{key}=null, or the right name")
    for key in ("mem", "shm"):
        check_quantity(f"cluster.{key}", cluster[key])
    for name, value in cluster["resources"].items():
        if not QUALIFIED.fullmatch(str(name)) or name in ("cpu", "memory", "nvidia.com/gpu"):
            rule = "must be the name of a resource without a setting of its own"
            raise bad(
                "cluster.resources", name, rule, "cluster.cpus, cluster.mem, cluster.gpus_per_node, or another name"
            )
        check_quantity(f"cluster.resources.{name}", value)
    check_place(cluster)
    check_environment(cluster)
    mounts(cluster["volumes"])
    if cluster["kind"] == "pytorchjob" and cluster["max_restarts"]:
        rule = "PyTorchJob does not count restarts by exit code"
        raise bad(
            "cluster.max_restarts", cluster["max_restarts"], rule, "cluster.max_restarts=0, or cluster.kind=jobset"
        )


def check_quantity(key: str, value: Any) -> None:
    if value is not None and not QUANTITY.fullmatch(str(value)):
        raise bad(key, value, "must be a quantity of Kubernetes", f"{key}=16Gi")


def check_place(cluster: dict[str, Any]) -> None:
    for name, value in cluster["node_selector"].items():
        if not QUALIFIED.fullmatch(str(name)) or not LABEL_VALUE.fullmatch(str(value)):
            rule = "must be a label of nodes and its value"
            raise bad("cluster.node_selector", f"{name}: {value}", rule, "kubectl get nodes --show-labels lists them")
    if cluster["topology"] is not None and not QUALIFIED.fullmatch(cluster["topology"]):
        raise bad("cluster.topology", cluster["topology"], "must be a label of nodes", "topology.kubernetes.io/zone")
    fields = ("key", "operator", "value", "effect", "tolerationSeconds")
    for item in cluster["tolerations"]:
        if not isinstance(item, dict) or set(item) - set(fields):
            rule = f"each must be a mapping with {', '.join(fields)}"
            raise bad("cluster.tolerations", item, rule, "'cluster.tolerations=[{key: gpu, operator: Exists}]'")
    for name in ("containers", "initContainers", "restartPolicy", "terminationGracePeriodSeconds"):
        if name in cluster["pod"]:
            raise bad("cluster.pod", name, "is set by dtrain and cannot be overridden", "leave it out")


def check_environment(cluster: dict[str, Any]) -> None:
    for name in cluster["env"]:
        if not VARIABLE.fullmatch(str(name)):
            raise bad("cluster.env", name, "must be the name of an environment variable", "e.g. HF_HOME")
        if SECRET_NAME.search(str(name)):
            rule = "looks like a secret, and everyone who may read jobs sees a manifest"
            fix = f"kubectl create secret generic SECRET --from-literal=KEY=…; 'cluster.secret_env=[{name}:SECRET/KEY]'"
            raise bad("cluster.env", name, rule, fix)
    for text in cluster["secret_env"]:
        secret_reference(text)


def secret_reference(text: str) -> tuple[str, str, str]:
    """(variable, name of the Secret, key in it) of VARIABLE:SECRET/KEY."""
    variable, _, place = text.partition(":")
    name, _, key = place.partition("/")
    if not (VARIABLE.fullmatch(variable) and NAME.fullmatch(name) and KEY.fullmatch(key)):
        shown = f"{variable}:…" if VARIABLE.fullmatch(variable) else "…"  # it may be the secret itself
        fix = "'cluster.secret_env=[WANDB_API_KEY:wandb/key]', never the value itself"
        raise bad("cluster.secret_env", shown, "must be VARIABLE:SECRET/KEY", fix)
    return variable, name, key


def mounts(volumes: list[str]) -> list[tuple[str, str, bool]]:
    """(claim, path, read only) of each CLAIM:PATH or CLAIM:PATH:ro."""
    found: list[tuple[str, str, bool]] = []
    for text in volumes:
        claim, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        plain = str(PurePosixPath(path))
        if (
            not NAME.fullmatch(claim)
            or not path.startswith("/")
            or plain == "/"
            or ".." in path
            or mode not in ("", "ro")
        ):
            raise bad(
                "cluster.volumes", text, "must be CLAIM:PATH or CLAIM:PATH:ro", "'cluster.volumes=[training:/data]'"
            )
        if any(plain == other for _, other, _ in found) or plain in MOUNTED:
            raise bad("cluster.volumes", text, f"something else is mounted at {plain}", "another path")
        found.append((claim, plain, mode == "ro"))
    return found


def volume_for(cluster: dict[str, Any]) -> str:
    """Return the settings that give the pods a volume for the run folder."""
    root = Path(cluster["run_root"] or "/data")
    where = root if root.is_absolute() and root != Path("/") and ".." not in root.parts else "/data"
    typed = [] if where == root and cluster["run_root"] else [f"cluster.run_root={where}"]
    kept = [text for text in cluster["volumes"] if text.split(":")[1] != str(where)]
    volumes = ",".join([*kept, f"training:{where}"])
    return " ".join([f"'cluster.volumes=[{volumes}]'", *typed]) + "   (training: a claim; kubectl get pvc lists yours)"


def pods_run_dir(config: dict[str, Any]) -> Path:
    """Return the run folder as the pods see it: it must be on a volume, which all of them share."""
    cluster, run_dir = config["cluster"], Path(config["run_dir"])
    paths = [Path(path) for _, path, read_only in mounts(cluster["volumes"]) if not read_only]
    setting, folder = "run_dir", run_dir
    if cluster["run_root"] is not None:  # the last parts are those of outputs/DATE/TIME-NAME and DATE/TIME/POINT
        setting, folder = "cluster.run_root", Path(cluster["run_root"], *run_dir.parts[1:][-3:])
    if ".." in folder.parts or not any(folder != path and folder.is_relative_to(path) for path in paths):
        shown = cluster["run_root"] if setting == "cluster.run_root" else config["run_dir"]
        rule = "must be below a volume that the pods can write to, as they share the run folder"
        if not paths:
            raise bad(setting, shown, rule, volume_for(cluster))
        fix = f"cluster.run_root={paths[0]}; or run_dir={paths[0]}/… if this machine mounts that volume there, too"
        raise bad(setting, shown, rule, fix)
    return folder
