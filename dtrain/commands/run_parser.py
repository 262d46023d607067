"""The parser of commands that need a RUN: without one, it says what to give."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dtrain.errors import bad
from dtrain.runs.find import no_run

TRUST = "your own modules that the run uses; 'trust=[MODULE]' is the same"
CHECKPOINT = "a run folder, a part of its name, or latest; RUN@STEP or RUN@best for another than the newest checkpoint"


class RunParser(argparse.ArgumentParser):
    """Takes `trust=[MODULE]` for `--trust MODULE`, like the launcher, and finds modules of the working folder."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        if any("--trust" in action.option_strings for action in self._actions):
            listed = [word.removeprefix("trust=").strip("[]").split(",") for word in words if is_trust(word)]
            words = [word for word in words if not is_trust(word)]
            names = [name.strip() for found in listed for name in found if name.strip()]
            words += ["--trust", *names] if names else []  # at the end: what follows --trust counts as its modules
        # intermixed: evaluate RUN --batch-size 8 data=text
        some = any(not action.option_strings and action.nargs == "*" for action in self._actions)
        options = (self.parse_intermixed_args if some else super().parse_args)(words, namespace)
        for name in getattr(options, "trust", None) or ():
            if not re.fullmatch(r"[^\W\d][\w.]*", name):
                raise bad("--trust", name, "is not the name of a module", f"put {name} before --trust")
        if getattr(options, "trust", None) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, like the launcher: nothing there hides a package
        return options

    def error(self, message: str) -> NoReturn:
        if re.match(r"the following arguments are required: (run|RUN)\b", message):
            needed = [a.dest.upper() for a in self._actions if not a.option_strings and a.nargs is None]
            raise no_run(" ".join([self.prog, "latest", *(name for name in needed if name != "RUN")]))
        super().error(message)


def is_trust(word: str) -> bool:
    return word.startswith("trust=")
