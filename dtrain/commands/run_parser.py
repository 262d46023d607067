"""The parser of commands that need a RUN: without one, it says what to give."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from dtrain.runs.find import no_run


class RunParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if re.match(r"the following arguments are required: (run|RUN)\b", message):
            needed = [a.dest.upper() for a in self._actions if not a.option_strings and a.nargs is None]
            raise no_run(" ".join([self.prog, "latest", *(name for name in needed if name != "RUN")]))
        super().error(message)
