"""Links of the pages that leave docs/ (source code, results, conf/), for the site that `make docs` builds.

On GitHub such a link opens the file. The site has no repository behind it, so it gets a copy of each linked file below
source/, and the link points there. A link to something that does not exist is left alone, and `mkdocs build --strict`
refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(\.\./[^)\s#]+)(#[^)\s]*)?(?=\))")
SHOWN_AS_THEY_ARE = (".svg", ".png", ".json")  # a browser shows others as text when their name ends so


def place_of(target: str) -> str | None:
    """The copy's place in the site; None: there is no such file in the repository."""
    path = (ROOT / "docs" / target).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix in SHOWN_AS_THEY_ARE else f"source/{name}.txt"


def content_of(target: str) -> bytes:
    path = (ROOT / "docs" / target).resolve()
    if path.is_dir():
        return "\n".join(sorted(child.name for child in path.iterdir())).encode()
    return path.read_bytes()


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of everything that a page links to outside docs/."""
    for page in files.documentation_pages():
        for _, target, _ in LINK.findall(page.content_string):
            place = place_of(target)
            if place and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=content_of(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links to the copies."""
    return LINK.sub(lambda match: f"{match[1]}{place_of(match[2]) or match[2]}", markdown)
