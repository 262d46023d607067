"""The configuration: where it lies, how it is written, read and turned into objects.

Hydra composes once, in the launcher (dtrain/launch.py). Workers read `run_dir/config.yaml` with `load` and
make every object with `build`, the only place that turns a name in a file into code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SECRET = re.compile(r"(^|[._-])(((api|access)_?key|secret|password|passwd|credential)s?|token)$", re.IGNORECASE)


# all that breaks a line for a shell, a terminal or Python's splitlines
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# settings of a cluster that say what is executed: typed, or in conf/, never from a recipe or a run folder
CODE = ("setup", "python", "srun", "sbatch", "container_image", "container_mounts")


def _folder(name: str) -> Path:
    """conf/ and recipes/: inside the package when installed from a wheel, at the top of a checkout."""
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parent / name


CONF = _folder("conf")
RECIPES = _folder("recipes")


def read_yaml(path: Path) -> Any:
    """Plain values of a yaml file, and nothing but those; in C where that is there, ten times as fast."""
    import yaml

    return yaml.load(path.read_bytes(), yaml_loader())


@functools.cache
def yaml_loader() -> Any:
    """PyYAML's safe one, for which 1e-5 is a number as it is for OmegaConf; YAML 1.1 wants it written 1.0e-5."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Of our own: a resolver that is added to theirs would be there for everybody."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


@functools.cache
def section(group: str, name: str) -> dict[str, Any]:
    """conf/GROUP/NAME.yaml over the files of its group that it builds on, without composing a whole configuration.

    Not to be changed: it is read once.
    """
    own: dict[str, Any] = read_yaml(CONF / group / f"{name}.yaml")
    bases = [base for base in own.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    whole: dict[str, Any] = {}
    for part in (*(section(group, base) for base in bases), {k: v for k, v in own.items() if k != "defaults"}):
        whole = over(whole, part)
    return whole


def over(below: Any, above: Any) -> Any:
    """Sections are laid over each other, setting by setting; any other value takes the place of the one below."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: over(below.get(key), value) for key, value in above.items()}


def bad(key: str, value: Any, rule: str, fix: str) -> ValueError:
    """The shape of every message about a setting: the setting, its value, the rule, a fix."""
    return ValueError(f"{key}={'null' if value is None else value}: {rule}\n  fix: {fix}")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}. Lists are values, not branches."""
    if not isinstance(node, dict) or (not node and prefix):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def allowed(target: str, trust: Iterable[str]) -> bool:
    return any(target == name or target.startswith(name + ".") for name in ("dtrain", *trust))


def build(node: Any, trust: Iterable[str] = (), **extra: Any) -> Any:
    """Make the object that `node` describes: `_target_` called with the other keys, nested ones first.

    Only names inside `dtrain` and the modules of `trust` are called. `_partial_: true` gives the callable with
    its settings bound, for what needs more than the configuration knows.
    """
    if isinstance(node, Mapping) and not isinstance(node, dict):  # OmegaConf's
        from omegaconf import OmegaConf

        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, list):
        return [build(item, trust) for item in node]
    if not isinstance(node, dict):
        return node
    settings = {k: build(v, trust) for k, v in node.items() if k not in ("_target_", "_partial_")}
    if "_target_" not in node:
        return settings
    target = locate(str(node["_target_"]), trust)
    if node.get("_partial_"):
        return functools.partial(target, **settings, **extra)
    return target(**settings, **extra)


def locate(target: str, trust: Iterable[str] = ()) -> Any:
    trust = tuple(trust)
    module_name, _, attribute = target.rpartition(".")
    found = None
    if allowed(target, trust) and module_name:
        try:
            found = getattr(importlib.import_module(module_name), attribute, None)
        except ModuleNotFoundError as error:
            raise bad(
                "_target_", target, f"cannot be imported ({error})", "check the spelling, or install it"
            ) from error
        if found is None:
            raise bad("_target_", target, f"{module_name} has no {attribute}", "check the spelling")
    # the second test closes the back door of a name that an allowed module merely imported, e.g. subprocess.Popen
    if found is None or not allowed(getattr(found, "__module__", ""), trust):
        raise bad(
            "_target_",
            target,
            "only dtrain's own code and the modules you trust may be called",
            f"trust=[{target.partition('.')[0]}] if that module is yours",
        )
    return found


def save(run_dir: Path, config: dict[str, Any]) -> None:
    """Write config.yaml, complete and resolved; a value under a secret-like key is blacked out."""
    from omegaconf import OmegaConf

    temporary = run_dir / ".config.yaml.tmp"
    OmegaConf.save(OmegaConf.create(redact(config)), temporary)
    os.replace(temporary, run_dir / "config.yaml")


def redact(node: Any) -> Any:
    if isinstance(node, list):
        return [redact(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {k: "<redacted>" if v and SECRET.search(str(k)) else redact(v) for k, v in node.items()}


class Settings(dict[str, Any]):
    """A dict whose keys can be read as attributes. OmegaConf's takes 20 µs a read, and the loop reads often."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({k: Settings(v) if isinstance(v, dict) else v for k, v in values.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def load(run_dir: Path) -> Settings:
    """What the ranks read: config.yaml, as the launcher wrote it."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    return Settings(values)


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration with what an older version did not write, as that version meant it."""
    precision, checkpoint = config.get("precision"), config.get("checkpoint")
    if isinstance(precision, dict) and precision.get("_target_") == "dtrain.precision.Precision":
        precision.setdefault("stream", "float32")
    if isinstance(checkpoint, dict):
        checkpoint.setdefault("background", True)
    return {"nsys": False, "cuda_graphs": "none", "profile": {"_target_": "dtrain.profile.record.Profile"}} | config


def fingerprint(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "config.yaml").read_bytes()).hexdigest()


def world_size(config: Any) -> int:
    return int(config["cluster"]["nodes"] * config["cluster"]["processes"])


def gpus_per_node(cluster: Mapping[str, Any]) -> int:
    """GPUs of a node: of this machine, unless the ranks run elsewhere."""
    return int(cluster["gpus_per_node"]) if "gpus_per_node" in cluster else count_gpus()


def ranks_per_node(cluster: Mapping[str, Any]) -> int:
    """cluster.processes, or what null means: one per GPU; without any 2 here, and 1 on a cluster."""
    return int(cluster.get("processes") or gpus_per_node(cluster) or (1 if "gpus_per_node" in cluster else 2))


def count_gpus() -> int:
    """GPUs that a process started here would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit())
    if visible is None:
        return present
    return min(present, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))
