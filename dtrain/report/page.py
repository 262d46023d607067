"""`dtrain report`: one HTML file about one or several runs, which opens from disk and loads nothing from a network.

`collect` reads the run folders into plain values, and `render` puts them beside the script and the style of html/. A
run folder is untrusted: its text travels as compressed JSON, and the script writes it as text nodes only. The page's
Content-Security-Policy names its one script by its hash, so nothing else can run, and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain import __version__
from dtrain.config.redaction import HIDDEN, SECRET, hidden, hide
from dtrain.config.run_file import flat_config
from dtrain.report.lineage import lineage_svg
from dtrain.report.run_data import run_data
from dtrain.runs.record import load
from dtrain.runs.search_journal import read_journal
from dtrain.util.format import clean, finite

FILES = Path(__file__).parent / "html"
SCRIPTS = ("format.js", "chart.js", "sweep.js", "details.js", "page.js")  # in this order, as one script
# points of one curve: as many as a wide screen shows, fewer on a page of many runs
MOST_POINTS, FEWEST_POINTS, POINTS_OF_ALL = 2000, 100, 16_000
OF_SYSTEM = 8  # a curve of system metrics has this many times fewer: there are many of them
LONGEST_VALUE = 500  # characters of a setting
MOST_SETTINGS = 2000


def collect(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Read the runs into what the page shows, without secrets."""
    records, problem = load(run_dirs)
    most = max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_ALL // max(1, len(records))))
    runs = [run_data(record, most, max(40, most // OF_SYSTEM)) for record in records]
    name_apart(runs, run_dirs)
    return {
        "version": __version__,
        "created": time.time(),
        "problem": problem,
        "runs": runs,
        "settings": settings([Path(d) for d in run_dirs]),
    }


def name_apart(runs: list[dict[str, Any]], run_dirs: Sequence[Path]) -> None:
    """Name each run differently: as it is, or by as much of its path as it takes. 3-optim.lr=0.1 becomes 3-lr=0.1."""
    paths = [Path(run_dir).parts for run_dir in run_dirs]
    for count in range(6):
        names = [hide(clean("/".join(parts[-count:]))) for parts in paths] if count else [run["name"] for run in runs]
        for found in ([re.sub(r"(?<=[-,])(\w+\.)+(?=\w+=)", "", name) for name in names], names):
            if len(runs) > 1 and len(set(found)) == len(runs):
                for run, name in zip(runs, found, strict=True):
                    run["name"] = name
                return


def settings(run_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return what all runs share as {setting: value}, and what differs as {setting: [value of each run]}."""
    configs = [
        {str(k)[:LONGEST_VALUE]: setting(str(k), v) for k, v in list((flat_config(d) or {}).items())[:MOST_SETTINGS]}
        for d in run_dirs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys}
    alike = {key for key in values if all(key in c and repr(c[key]) == repr(values[key][0]) for c in configs)}
    same = {key: values[key][0] for key in values if key in alike}
    return {"same": hidden(same), "differ": hidden({key: v for key, v in values.items() if key not in alike})}


def setting(key: str, value: Any) -> Any:
    """A number, true, false or null as it is; anything else as text."""
    if value and SECRET.search(key):
        return HIDDEN
    if value is None or isinstance(value, bool) or (finite(value) is not None and abs(value) < 2**53):
        return value
    return str(value)[:LONGEST_VALUE]


def render(data: dict[str, Any], title: str, lineage: str = "") -> str:
    """Return the page: template, style, script and data in one text."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    style = (FILES / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; base-uri 'none'; "
    policy += "form-action 'none'"
    page = (FILES / "page.html").read_text(encoding="utf-8")
    parts = {"policy": policy, "title": html.escape(title), "style": style, "data": packed, "script": script}
    parts["lineage"] = lineage
    return re.sub(r"\[\[(\w+)\]\]", lambda found: parts[found[1]], page)  # one pass: what is put in is not searched


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write(run_dirs: Sequence[Path], file: Path, title: str) -> int:
    """Write the page; return its size in bytes."""
    searches = {Path(run_dir).parent for run_dir in run_dirs}  # one search, or runs that have no search in common
    lineage = lineage_svg(read_journal(searches.pop())) if len(searches) == 1 and len(run_dirs) > 1 else ""
    data = render(collect(run_dirs), title, lineage).encode()
    replace(file, data)
    return len(data)


def replace(file: Path, data: bytes) -> None:
    """Write a new file in its place, not through a link: a run folder may come from someone else."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as temporary:
        temporary.write(data)
    os.chmod(temporary.name, 0o644)
    os.replace(temporary.name, file)
