"""The configuration: where it lies, how it is written, read and turned into objects.

Hydra composes once, in the launcher (dtrain/launch.py). Workers read `run_dir/config.yaml` with `load` and
make every object with `build`, the only place that turns a name in a file into code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.redaction import SECRET as SECRET
from dtrain.redaction import redact as redact

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


LONGEST = 400  # characters of a value that a message repeats


def bad(key: str, value: Any, rule: str, fix: str) -> ValueError:
    """The shape of every message about a setting: the setting, its value, the rule, a fix."""
    text = "null" if value is None else str(value)
    return ValueError(f"{key}={text if len(text) <= LONGEST else text[:LONGEST] + '…'}: {rule}\n  fix: {fix}")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}. Lists are values, not branches."""
    if not isinstance(node, dict) or (not node and prefix):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


# ---- from a name in a file to code ---------------------------------------------------------------------------

TARGET, PARTIAL = "_target_", "_partial_"
RESERVED = re.compile(r"_\w+_")  # _target_ and its like: what Hydra's own instantiate obeys, and nobody else may use
# The modules that the user trusts, from the launcher to the ranks. Not by the run folder, which may come from
# elsewhere: a process inherits it, and SLURM keeps it with the job's script, also when the job is queued again.
TRUST = "DTRAIN_TRUST"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


def typed_trust() -> list[str]:
    """The modules that the user trusted by typing them, as the launcher passed them on to this process."""
    return [name for name in os.environ.get(TRUST, "").split(",") if name]


def allowed(target: str, trust: Iterable[str]) -> bool:
    """May this be called: does conf/ name it, or is it in a module that the user trusts?"""
    if target.partition(".")[0] == "dtrain":  # never by trust: config.build with a `trust` of its own calls anything
        return bound(target) is not None
    return any(target == name or target.startswith(name + ".") for name in trust)


def bound(target: str) -> bool | None:
    """Whether conf/ binds the target's settings instead of calling it; None: conf/ does not name the target."""
    found = next((option for group in GROUPS if (option := option_of(group, target))), None)
    return None if found is None else bool(found.get(PARTIAL))


@functools.cache
def option_of(group: str, target: str) -> dict[str, Any] | None:
    """The first option of conf/GROUP/ with this target. Not to be changed: it is read once."""
    for path, text in files(group):
        if target.encode() in text:  # quicker than to parse all of them
            option: dict[str, Any] = read_yaml(path)
            if option.get(TARGET) == target:
                return option
    return None


@functools.cache
def files(group: str) -> list[tuple[Path, bytes]]:
    """The options of a group, as they are written."""
    return [(path, path.read_bytes()) for path in sorted((CONF / group).glob("*.yaml"))]


def targets(group: str) -> list[str]:
    """Every target that conf/GROUP/ names."""
    found = {read_yaml(path).get(TARGET) for path in (CONF / group).glob("*.yaml")}
    return sorted(found - {None})


def build(section: Any, trust: Iterable[str] = (), **extra: Any) -> Any:
    """Make the object that a section describes: its `_target_`, called with the other settings as plain values.

    Only what conf/ names and what the modules of `trust` define is called, and only at the top of the section.
    `_partial_: true` gives the callable with its settings bound, for what needs more than the configuration knows.
    """
    if section is None:
        return None
    if isinstance(section, Mapping) and not isinstance(section, dict):  # OmegaConf's
        from omegaconf import OmegaConf

        section = OmegaConf.to_container(section, resolve=True)
    if not isinstance(section, dict) or not isinstance(section.get(TARGET), str):
        raise bad(TARGET, None, "a section must name what to build", "choose an option of conf/")
    settings = plain({k: v for k, v in section.items() if k not in (TARGET, PARTIAL)}, "")
    target = locate(section[TARGET], trust)
    in_conf = bound(section[TARGET])  # wins: a file cannot have called what is to be bound
    if section.get(PARTIAL) if in_conf is None else in_conf:
        return functools.partial(target, **settings, **extra)
    return target(**settings, **extra)


def plain(node: Any, key: str) -> Any:
    """Plain values, copied. A nested `_target_` or the like is refused: nobody would notice it in a file."""
    if isinstance(node, dict):
        for name in node:
            if RESERVED.fullmatch(str(name)):
                raise reserved(f"{key}.{name}".lstrip("."), node[name])
        return {name: plain(value, f"{key}.{name}".lstrip(".")) for name, value in node.items()}
    return [plain(item, key) for item in node] if isinstance(node, (list, tuple)) else node


def reserved(key: str, value: Any) -> ValueError:
    rule = f"names like {key.rpartition('.')[2]} stand at the top of a group only: nothing nested is built"
    return bad(key, value, rule, f"leave out {key}; settings are plain values")


def locate(target: str, trust: Iterable[str] = ()) -> Any:
    trust = tuple(trust)
    module_name, _, attribute = target.rpartition(".")
    if not module_name or not allowed(target, trust):
        raise untrusted(TARGET, target, trust)
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise bad(TARGET, target, f"cannot be imported ({error})", "check the spelling, or install it") from error
    if found is None:
        raise bad(TARGET, target, f"{module_name} has no {attribute}", "check the spelling")
    # closes the back door of a name that a trusted module merely imported, e.g. subprocess.Popen
    home = getattr(found, "__module__", None) or ""
    names = (home, f"{home}.{getattr(found, '__name__', '')}")
    if not (home.partition(".")[0] == target.partition(".")[0] == "dtrain" or any(allowed(n, trust) for n in names)):
        raise untrusted(TARGET, target, trust)
    return found


def untrusted(key: str, target: str, trust: Iterable[str]) -> ValueError:
    """Refuse a target. The fix names a module only if it is a file of the user's own, never what a file suggests."""
    rule = "only dtrain's own code and the modules you trust may be called"
    fix = "an option of conf/, or trust=[…] with the module's name, if you know that code and want it to run"
    module = target.partition(".")[0]
    if file := own_file(module):
        names = [*trust, module]
        fix = f"trust=[{','.join(names)}] if that module is yours ({file}); after a run: --trust {' '.join(names)}"
    return bad(key, target, rule, fix)


def own_file(module: str) -> Path | None:
    """Where a top-level module of the user's own lies, found without importing it; None: it is Python's, installed, or
    not there."""
    import sysconfig

    if not module.isidentifier() or module == "dtrain" or module in sys.stdlib_module_names:
        return None
    spec = importlib.machinery.PathFinder.find_spec(module, [os.getcwd(), *sys.path])
    places = [spec.origin] if spec and spec.origin else list((spec and spec.submodule_search_locations) or [])
    if not places or not Path(places[0]).exists():
        return None
    file = Path(places[0]).resolve()
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    return None if installed & {*file.parents} or "site-packages" in file.parts else file


# ---- the file ------------------------------------------------------------------------------------------------


def save(run_dir: Path, config: dict[str, Any]) -> None:
    """Write config.yaml, complete and resolved; a value under a secret-like key is blacked out."""
    from omegaconf import OmegaConf

    temporary = run_dir / ".config.yaml.tmp"
    OmegaConf.save(OmegaConf.create(redact(config)), temporary)
    os.replace(temporary, run_dir / "config.yaml")


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
    """What the ranks read: config.yaml, as the launcher wrote it. A folder that somebody changed runs nothing."""
    from dtrain.untrusted_config import read_run

    return Settings(read_run(run_dir))


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration with what an older version did not write, as that version meant it."""
    precision, checkpoint = config.get("precision"), config.get("checkpoint")
    if isinstance(precision, dict) and precision.get("_target_") == "dtrain.precision.Precision":
        precision.setdefault("stream", "float32")
    if isinstance(checkpoint, dict):
        checkpoint.setdefault("background", True)
    if isinstance(config.get("train"), dict):
        config["train"].setdefault("check_replicas_every", 500)
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
