"""`dtrain log`: send runs to a tracker, later or again; what the tracker has already is not sent twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain.checks.loggers import ADDRESSES, check
from dtrain.commands.run_parser import RunParser
from dtrain.config import run_file
from dtrain.config.build import typed_trust
from dtrain.config.files import LOGGER
from dtrain.config.schema import check_group
from dtrain.errors import bad
from dtrain.loggers.follow import Feed, locked, one_line
from dtrain.runs.find import find_run
from dtrain.runs.protocol import DONE, FAILED
from dtrain.util.format import as_dict, short_path


def main(argv: list[str]) -> int:
    """`dtrain log`: exit code 0 if each tracker has all metrics of each run."""
    parser = RunParser(
        "dtrain log",
        description="Send runs to trackers, finished or running: also what a tracker missed because its server was "
        "down. Nothing arrives twice.",
    )
    parser.add_argument("run", nargs="*", help="a run folder, a part of its name, or latest")
    parser.add_argument(
        "override",
        nargs="*",
        help="logger=mlflow, logger=[csv,mlflow], logger.mlflow.uri=…, default: the run's; trust=[MODULE]: your code",
    )
    options = parser.parse_args(argv)
    words = [*options.run, *options.override]
    overrides = [word for word in words if word.startswith((f"{LOGGER}=", f"{LOGGER}.", "trust="))]
    runs = [find_run(word) for word in words if word not in overrides] or [find_run("latest")]
    typed, trust = chosen(overrides) if overrides else (None, [])
    todo = [(run, own(run, trust) if typed is None else typed) for run in runs]
    failed = False
    for run, sections in todo:
        for name, section in sections.items():
            failed = not send(run, name, section, trust) or failed
    return FAILED if failed else DONE


def chosen(overrides: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the section that these overrides make (None: the run's own), and the modules that they trust."""
    from dtrain.launch.compose import compose  # Hydra takes a while

    if all(word.startswith("trust=") for word in overrides):
        return None, list(compose(overrides)["trust"])
    if not any(word.startswith(f"{LOGGER}=") for word in overrides):
        name = next((word.split(".")[1] for word in overrides if word.startswith(f"{LOGGER}.")), "tensorboard")
        raise bad(LOGGER, "", "the overrides do not choose a tracker", f"{LOGGER}={name} {' '.join(overrides)}")
    config = compose(overrides)
    check(config | {"dry_run": False})
    return checked(config[LOGGER], "none"), list(config["trust"])


def own(run: Path, trust: list[str]) -> dict[str, Any]:
    """Return the run's own trackers; the folder may come from someone else, so that it names no server."""
    config = run_file.read_run(run)
    section = as_dict(config.get(LOGGER))
    check_group(LOGGER, {LOGGER: section}, [*typed_trust(), *trust])
    for name, settings in section.items():
        for key in ADDRESSES:
            if settings.get(key):
                rule = "the run folder names this server, and it would get your credentials"
                fix = f"type it: logger={name} logger.{name}.{key}={settings[key]}"
                raise bad(f"logger.{name}.{key}", settings[key], rule, fix)
    check({LOGGER: section, "dry_run": False})
    return checked(section, "none")


def checked(section: dict[str, Any], choice: str) -> dict[str, Any]:
    if not section:
        raise bad(LOGGER, choice, "there is no tracker to send to", "logger=tensorboard, or another of conf/logger/")
    return section


def send(run: Path, name: str, section: dict[str, Any], trust: list[str]) -> bool:
    """Send one run to one tracker, and report it in a line."""
    feed = Feed(name, section, run, trust)
    try:
        with locked(run, name):
            feed.send()
    except ValueError as error:
        if "  fix: " in str(error):
            raise
        feed.problem = one_line(error)
    except Exception as error:  # whatever a tracker's library raises
        feed.problem = one_line(error)
    ended = f"complete, {feed.sent} rows were new" if feed.done else f"not complete: {feed.problem}"
    print(f"{short_path(run)} → {name}: {ended}", flush=True)
    return feed.done
