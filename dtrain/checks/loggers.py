"""Rules of the trackers: what is installed, where servers are, and that no setting holds a secret."""

from __future__ import annotations

import importlib.util
import netrc
import os
from typing import Any
from urllib.parse import urlsplit

from dtrain.config.files import ADDRESSES as ADDRESSES
from dtrain.config.redaction import IN_ADDRESS
from dtrain.errors import bad
from dtrain.util.format import as_dict

NEEDS = ("tensorboard", "wandb", "mlflow", "trackio")  # options that need an extra of the same name


def check(config: dict[str, Any]) -> None:
    for name, section in config["logger"].items():
        if name in NEEDS and section["_target_"].startswith("dtrain."):
            check_installed(name)
        for key in ADDRESSES:
            check_address(f"logger.{name}.{key}", section.get(key))
        if (every := section.get("every", 1)) < 1:
            raise bad(f"logger.{name}.every", every, "must be at least 1", f"logger.{name}.every=1")
        if name == "wandb" and section.get("mode") == "online" and not config["dry_run"] and not is_offline():
            check_key()


def check_installed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise bad("logger", name, f"{name} is not installed", f"pip install 'dtrain[{name}]', or logger=none")


def check_address(key: str, value: object) -> None:
    if not isinstance(value, str):
        return
    if IN_ADDRESS.search(value):
        rule = "has a password or token in it, and a configuration is written to disk in several places"
        raise bad(key, "…", rule, "give it in an environment variable: see conf/logger/")
    try:
        parts = urlsplit(value)
        known = bool(parts.scheme) and (parts.scheme not in ("http", "https") or bool(parts.hostname))
        _ = parts.port
    except ValueError:
        known = False
    schemes = ("http", "https") if key.endswith("server_url") else ("http", "https", "sqlite", "file", "postgresql",
                                                                    "mysql", "mssql", "databricks")  # fmt: skip
    if not known or parts.scheme.partition("+")[0] not in schemes:
        raise bad(
            key, value, f"must be an address that begins with {', '.join(schemes)}", f"{key}=http://localhost:5000"
        )


def is_offline() -> bool:
    """Has the environment turned W&B's network off? It wins over logger.wandb.mode=online."""
    return os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")


def check_key() -> None:
    """W&B would ask on the terminal for a key, and the follower has none."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    if not os.environ.get("WANDB_API_KEY") and not known:
        fix = "wandb login, or export WANDB_API_KEY=…, WANDB_MODE=offline or logger.wandb.mode=offline"
        raise bad("logger", "wandb", f"no key for {host} is known", fix)


def check_resumed(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Reject a server's address that only the run folder names: the folder may come from someone else."""
    for name, section in as_dict(old.get("logger")).items():
        for key in ADDRESSES:
            then = as_dict(section).get(key)
            if then and name in new["logger"] and not new["logger"][name].get(key):
                rule = "the run folder names this server, and it would get your credentials"
                raise bad(f"logger.{name}.{key}", then, rule, f"type it again: logger.{name}.{key}={then}")
