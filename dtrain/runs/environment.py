"""What launch.json remembers of the environment of a run's launches: untrusted, so each text shown is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtrain.util.format import as_dict

MOST = 60  # versions or variables shown
LONGEST = 200  # characters of one value


def recorded(launches: object) -> dict[str, Any]:
    """Return the environment of the newest launch; a launch that changed nothing has none of its own."""
    for launch in reversed(launches) if isinstance(launches, list) else ():
        if found := as_dict(as_dict(launch).get("environment")):
            return found
    return {}


def commit(launches: dict[str, Any]) -> str | None:
    """Return the newest launch's commit, given launch.json; older runs have it at the top."""
    found = recorded(launches.get("launches"))
    value = as_dict(found.get("code")).get("commit") if found else launches.get("git_commit")
    return short(value) if value else None


def versions(launches: dict[str, Any]) -> dict[str, str]:
    """Name → version of the packages, as the launcher found them."""
    found = as_dict(recorded(launches.get("launches")).get("versions"))
    return {short(name): short(version) for name, version in list(found.items())[:MOST]}


def rows(launches: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the code, the machine and the variables, given launch.json. Versions: `versions`."""
    found = recorded(launches.get("launches"))
    machine, code = as_dict(found.get("machine")), as_dict(found.get("code"))
    cores, usable = machine.get("cores"), machine.get("usable_cores")
    of = f"{short(usable)} of {short(cores)}" if usable and usable != cores else short(cores)
    cpu = [short(machine["cpu"]) if machine.get("cpu") else "", f"{of} cores" if cores else ""]
    num_gpus = machine.get("num_gpus")
    gpus = [f"{short(num_gpus)} × {short(machine.get('gpu') or 'GPU')}" if num_gpus else ""]
    gpus += [f"driver {short(machine['driver'])}" if machine.get("driver") else ""]
    variables = list(as_dict(found.get("variables")).items())
    more = [f"and {len(variables) - MOST} more"] if len(variables) > MOST else []
    texts = {
        "commit": commit_text(commit(launches), code),
        "launched on": _joined(cpu),
        "GPUs": _joined(gpus),
        "variables": " ".join([*(f"{short(name)}={short(value)}" for name, value in variables[:MOST]), *more]),
    }
    return [(label, text) for label, text in texts.items() if text]


def commit_text(name: str | None, code: dict[str, Any]) -> str:
    """Describe the commit and what was changed since."""
    parts = [f"{name} on {short(code['branch'])}" if name and code.get("branch") else name or ""]
    if code.get("dirty"):
        cut = ", not all of it" if code.get("diff_cut") else ""
        parts.append(f"with changes ({short(code['diff'])}{cut})" if code.get("diff") else "with changes")
    names = code.get("untracked")
    if isinstance(names, list) and names:
        more = " or more" if code.get("untracked_cut") else ""
        parts.append(f"{len(names)}{more} untracked")
    parts.append(short(code["problem"]) if code.get("problem") else "")
    return _joined(parts)


def short(value: object) -> str:
    """One line of bounded length; "?" for what is no text or number."""
    return " ".join(str(value)[:LONGEST].split()) if isinstance(value, (str, int, float)) else "?"


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part)
