"""The `dtrain` command. Each subcommand imports only what it needs, so that help and tables appear at once."""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import sys

from dtrain import __version__
from dtrain.commands import table

USAGE = table.usage()
COMMANDS = {name: command.module for name, command in table.COMMANDS.items()}  # each has a main(argv)


def main(argv: list[str] | None = None) -> int:
    is_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command in ("version", "--version"):
        print(f"dtrain {__version__}")
        return 0
    thresholds = gc.get_threshold()
    if command in ("plan", "launch"):
        gc.set_threshold(200_000)  # most objects stay alive: collecting them would take a tenth of the time
    try:
        if command not in COMMANDS:
            meant = table.meant(command, rest)
            is_misspelt = (
                meant and table.nearest(command) == meant[0] and not table.is_elsewhere(command) and "." not in command
            )
            fix = f"dtrain {shlex.join(meant)}" if meant else "dtrain --help lists them"
            fix = f"did you mean {fix}?" if is_misspelt else fix
            if command in ("rm", "delete", "remove", "clean"):
                fix = "`dtrain runs` lists the folders of runs; rm -r FOLDER deletes one"
            raise ValueError(f"{command or repr(command)}: there is no such command\n  fix: {fix}")
        code = run(command, rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # dtrain runs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at exit
        return 0
    except KeyboardInterrupt:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from dtrain.ui import console

        console.print_error("interrupted")
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from dtrain.ui import console

        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}\n  fix: check the path and its permissions"
        console.print_error(text)
        return 2
    finally:
        gc.set_threshold(*thresholds)
        if is_process:
            gc.freeze()  # the process ends now: a final collection would take a tenth of a launch


def run(command: str, argv: list[str]) -> int:
    """Run a command; add examples to its help."""
    if argv[:1] == ["help"] and command != "launch":  # dtrain plan help
        argv = ["--help", *argv[1:]]
    module = importlib.import_module(COMMANDS[command])
    if argv not in (["-h"], ["--help"]):
        return int(module.main(argv))
    try:
        code = int(module.main(argv))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    if text := table.example_text(command):
        print(text)
    return code


if __name__ == "__main__":  # run by dtrain/start.py
    sys.exit(main())
