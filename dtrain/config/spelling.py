"""Reject a class or function of the user's that is not typed as Python names it: net.py, net:Net, wave-net.Net."""

from __future__ import annotations

import re
from pathlib import Path

from dtrain.config.source_files import names_in
from dtrain.config.source_hints import MOST_SHOWN, files_with, likely, members, nearest_name
from dtrain.errors import bad


def check_spelling(key: str, value: str) -> None:
    """Reject `net.py`, `./net.py:Net`, `net` and `Net` where `net.Net` is meant."""
    check_importable(key, value)
    if not re.fullmatch(r"[\w./:-]+", value) or (not re.search(r"[/:]|\.py$", value) and not value.isidentifier()):
        return
    rule = "your own class or function is named as in Python, MODULE.NAME"
    path, _, name = value.removeprefix("./").replace("::", ":").partition(":")
    path = path.removesuffix(".py").removesuffix("/").replace(".", "/")
    file = next((p for p in (Path(f"{path}.py"), Path(path, "__init__.py")) if p.is_file()), None)
    if file is None and not name and "/" in path:  # net/Net
        path, _, name = path.rpartition("/")
        path = path.removesuffix("/py")  # net.py/Net
        file = next((p for p in (Path(f"{path}.py"), Path(path, "__init__.py")) if p.is_file()), None)
    if file is None and value.isidentifier():  # only the class is named
        files = files_with(value)
        file, name = (files[0], value) if files else (file, "")
        path = str(file.with_suffix("")) if file else path
    if file is None and re.search(r"\.py(:|$)", value):
        raise bad(key, value, f"there is no file {path}.py here", f"{key}=MODULE.NAME, as in Python: the file's class")
    if file is not None:
        module = path.replace("/", ".")
        if name:
            raise bad(key, value, rule, f"{key}={module}.{nearest_name(name, names_in(file)) or name}")
        there = members(module, key)
        others = f"; there is also {', '.join(there[1:MOST_SHOWN])}" if there[1:] else ""
        raise bad(key, value, rule, f"{key}={there[0]}{others}" if there else f"{key}={module}.NAME")


def check_importable(key: str, value: str) -> None:
    """Reject a class of a file whose name Python cannot import: wave-net.py, 3d_net.py."""
    found = re.fullmatch(r"(?:\./)?([\w-]+)(?:\.py)?[.:/]{0,2}(\w*)", value)
    file = Path(f"{found[1]}.py") if found else Path()
    if found is None or found[1].isidentifier():
        return
    stem = re.sub(r"\W", "_", found[1])
    stem = stem if stem.isidentifier() else f"my_{stem}"
    name = found[2] if found[2] not in ("", "py") else next(iter(likely(key, file)), "NAME")
    if Path(f"{stem}.py").is_file() and not file.is_file():
        raise bad(key, value, f"there is no file {file} here", f"did you mean {key}={stem}.{name}?")
    if file.is_file():
        rule = f"Python cannot import {file}: the name of a module has only letters, digits and _, and no digit first"
        raise bad(key, value, rule, f"mv {file} {stem}.py, then {key}={stem}.{name}")
