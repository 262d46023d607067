"""One output of a notebook cell that is updated in place: rich's live display needs ipywidgets for that."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 110


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, and a cell shows what it prints."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class CellOutput:
    """Has the methods of rich's Live that `Monitor` uses."""

    def __init__(self, get_renderable: Callable[[], RenderableType]) -> None:
        self.get_renderable, self.transient = get_renderable, False
        self.handle: Any = None

    def start(self) -> None:
        from IPython.display import display

        self.handle = display(self._data(), raw=True, display_id=True)

    def refresh(self) -> None:
        self.handle.update(self._data(), raw=True)

    def stop(self) -> None:
        self.handle.update({"text/plain": ""} if self.transient else self._data(), raw=True)

    def _data(self) -> dict[str, str]:
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, force_terminal=True)
        console.print(self.get_renderable())
        page = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", clear=False)
        return {"text/html": page, "text/plain": console.export_text().rstrip()}
