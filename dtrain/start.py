"""Run a module as a program: `python dtrain/start.py -m MODULE ARGUMENT …`, with the user's folders last on sys.path.

`python -m` puts the working folder first: a queue.py or numpy.py there would shadow the real module, for torch too.
Started this way, Python searches the user's folders last.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

VARIABLE = "DTRAIN_IMPORT_PATH"  # folders with the user's modules, passed to the ranks
SAFE_PATH = "DTRAIN_SAFE_PATH"  # set if PYTHONSAFEPATH is dtrain's own
PACKAGE = os.path.dirname(os.path.abspath(__file__))
START = os.path.join(PACKAGE, "start.py")


def import_folders() -> None:
    """Append the user's folders to sys.path."""
    folders = os.environ.get(VARIABLE, "").split(os.pathsep)
    sys.path += [folder for folder in dict.fromkeys(folders) if folder and folder not in sys.path]


def began() -> float:
    """Return when this process started, in seconds since the epoch; of a forked one, when it was forked."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])  # since the machine started
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return time.time()


def command(module: str, python: list[str] | None = None) -> list[str]:
    """Return the command that runs a module; a user's own Python, perhaps in a container, must find dtrain itself."""
    return [*python, "-m", module] if python else [sys.executable, START, "-m", module]


def environment(argv: Sequence[str] = (START,)) -> dict[str, str]:
    """Return environment variables for a Python started with `argv`; the user's own PYTHONPATH stays first."""
    folders = [*os.environ.get(VARIABLE, "").split(os.pathsep), os.getcwd()]
    wanted = {VARIABLE: os.pathsep.join(dict.fromkeys(filter(None, folders)))}
    if START in argv:
        return wanted  # start.py does the rest
    wanted |= safe_path()
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    checkout = os.path.dirname(PACKAGE)
    if checkout not in given and not _installed(checkout):
        wanted["PYTHONPATH"] = os.pathsep.join([*given, checkout])
    return wanted


def safe_path() -> dict[str, str]:
    """Return the variable that keeps the working folder off sys.path, and a note that it is not the user's own."""
    return {} if "PYTHONSAFEPATH" in os.environ else {"PYTHONSAFEPATH": "1", SAFE_PATH: "1"}


def _installed(checkout: str) -> bool:
    """Does every Python of this environment import dtrain from this folder?"""
    if os.path.basename(checkout) in ("site-packages", "dist-packages"):
        return True
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return f'file://{checkout}"' in (distribution("dtrain").read_text("direct_url.json") or "")
    except PackageNotFoundError:
        return False


def main(argv: list[str]) -> None:
    """Run a module with the dtrain package that contains this file, from any working folder."""
    import runpy
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(PACKAGE, "__init__.py")
    spec = spec_from_file_location("dtrain", file, submodule_search_locations=[PACKAGE])
    assert spec is not None and spec.loader is not None
    sys.modules["dtrain"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["dtrain"])
    os.environ.update(safe_path())  # for child processes: loaders' resource trackers, compilers
    if (checkout := os.path.dirname(PACKAGE)) not in sys.path:
        sys.path.append(checkout)  # for child processes of a rank, which inherit its sys.path
    import_folders()
    module, *rest = argv[argv.index("-m") + 1 :]  # Python options may come first, as with submitit
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath(PACKAGE):
        del sys.path[0]  # Python puts the script's folder first, and ours has a module named profile
    main(sys.argv[1:])
