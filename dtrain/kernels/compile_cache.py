"""Keep what torch.compile has compiled, for the next start of a run and for the other ranks.

torch keeps compiled graphs in a folder of the machine, under keys that cover the graph, its shapes, torch and the GPU.
A new node has no such folder, and gpt2-1.5b compiles for half a minute there (H200). So what a run has compiled or
loaded is stored as one file with a checksum in the user's cache folder, which the nodes of a cluster share. A rank on a
machine that does not have it yet puts it into torch's folder first.

Of the ranks of a machine that need the same graph, one compiles it; the others wait, and load it from torch's folder.
torch's keys contain the GPU's number, so ranks on different GPUs need different graphs, and have a file each.

Compiled graphs are code. So they are never in a run folder, which may come from someone else, and only the environment
can choose another folder (DTRAIN_COMPILE_CACHE). What another user could have written is not loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

import dtrain
from dtrain.util import checked_file
from dtrain.util.checked_file import UnusableFile

if TYPE_CHECKING:
    from torch.compiler._cache import CacheArtifact

log = logging.getLogger("dtrain")
VARIABLE = "DTRAIN_COMPILE_CACHE"  # a folder in place of the user's cache folder, or none
SOURCES = ("kernels", "models", "optim", "strategies", "comm")  # dtrain's code that is compiled, or changes graphs
MOST_BYTES = 2**30  # of one file
MOST_STORED = 2**33  # of all of them
QUIET_S = 5.0  # nothing has been compiled for so long: store it
MOST_WAIT_S = 600.0  # for another rank that compiles the same graph
MARKS = "dtrain"  # in torch's folder: a file for each graph that a rank has compiled, and for what was put there


class CompileCache:
    """One rank's part of the cache."""

    stores = False  # whether this rank stores what it has
    takes_turns = False  # whether another rank of this machine needs the same graphs

    def __init__(self, about: Mapping[str, Any]) -> None:
        """about: what the graphs depend on."""
        from torch._inductor.runtime import runtime_utils

        self.about = {"machine": machine(), **about}
        self.key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:32]
        self.path = checked_file.private_folder(shared_folder()) / f"{self.key}{checked_file.SUFFIX}"
        torchs: Any = runtime_utils
        self.marks = Path(torchs.cache_dir(), MARKS)
        self.marks.mkdir(exist_ok=True)
        self.seconds = {"compile": 0.0, "load": 0.0, "wait": 0.0}  # of this rank
        self.timer: threading.Timer | None = None
        self.storing = threading.Lock()
        began = time.perf_counter()
        with locked(self.marks / f"{self.key}.lock"):  # the ranks of a machine come at the same time
            self.found = self._load()
        self.seconds["load"] += time.perf_counter() - began

    def _load(self) -> bool:
        """Put what is stored into torch's folder, unless it is there. Never raises for a bad file: it is removed."""
        try:
            content, checksum = checked_file.read(self.path, self.about)
            mark = self.marks / f"{checksum[:32]}.loaded"
            if not mark.exists():
                if torch.compiler.load_cache_artifacts(content) is None:
                    raise UnusableFile(f"{self.path}: torch cannot read it")
                mark.touch()
        except FileNotFoundError:
            return False
        except Exception as error:  # torch unpickles what it loads
            log.warning("compile cache: not used, compiling again: %s", error)
            with contextlib.suppress(OSError):
                self.path.unlink()
            return False
        return True

    # ---- turns -----------------------------------------------------------------------------------------------

    def compile(self, compile_graph: Callable[[], Any], name: Callable[[], str]) -> Any:
        """Compile a graph, or load it. If another rank is compiling one of the same name, wait for that first."""
        began, missed = time.perf_counter(), num_compiled()
        with self._turn(name()) if self.takes_turns else contextlib.nullcontext():
            self.seconds["wait"] += time.perf_counter() - began
            began = time.perf_counter()
            compiled = compile_graph()
            was_loaded = num_compiled() == missed
            self.seconds["load" if was_loaded else "compile"] += time.perf_counter() - began
        self.store_later()
        return compiled

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        mark = self.marks / f"{name}.compiled"
        if mark.exists():
            yield
            return
        with locked(self.marks / f"{name}.lock", MOST_WAIT_S):
            if not mark.exists():
                yield
                mark.touch()
                return
        yield  # another rank has compiled it meanwhile: all others load it at the same time

    # ---- storing ---------------------------------------------------------------------------------------------

    def store_later(self) -> None:
        """Store in some seconds, while training goes on, unless there are more graphs until then."""
        if not self.stores:
            return
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(QUIET_S, self.store)
        self.timer.daemon = True
        self.timer.start()

    def store(self) -> None:
        """Add what this process has compiled or loaded to what is stored. A full disk only costs the cache."""
        if not self.stores:
            return
        with self.storing:  # the timer's thread may be at it
            try:
                with locked(self.marks / f"{self.key}.lock"):  # or another run of this machine
                    self._store()
            except Exception as error:  # also if torch's folder was deleted meanwhile
                log.warning("compile cache: not stored: %s", error)

    def _store(self) -> None:
        stored = self._stored()
        new = [artifact for artifact in recorded() if artifact not in stored]
        if not new:
            return
        content = serialize([*stored, *new])
        if len(content) > MOST_BYTES:
            log.warning("compile cache: not stored: %.1f GiB are more than 1", len(content) / 2**30)
            return
        checked_file.write(self.path, self.about, content)
        checked_file.prune(self.path.parent, MOST_STORED)

    def _stored(self) -> dict[CacheArtifact, None]:
        """Return what is stored, by this run or another of its kind, in its order."""
        try:
            by_kind = manager().deserialize(checked_file.read(self.path, self.about)[0])
        except (OSError, UnusableFile):
            by_kind = None
        return dict.fromkeys(artifact for artifacts in (by_kind or {}).values() for artifact in artifacts)

    def close(self) -> None:
        """At the end of a run: store what is not stored yet."""
        if self.timer is not None:
            self.timer.cancel()
        self.store()


_current: CompileCache | None = None  # of this process: torch's own cache is the process's, too


def begin(about: Mapping[str, Any]) -> CompileCache | None:
    """Use the cache from now on, before anything is compiled. None: it is off."""
    global _current
    _current = None
    if os.environ.get(VARIABLE) != "none" and os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") != "1":
        try:
            manager()
            _current = CompileCache(about)
        except (OSError, UnusableFile, ImportError) as error:
            log.warning("compile cache: off: %s", error)
    return _current


def finish() -> dict[str, Any]:
    """At the end of a run: store what is new; return what this process has compiled and loaded, with seconds."""
    counts = {"graphs_compiled": num_compiled(), "graphs_loaded": num_loaded()}
    if _current is None:
        return {"found": None, **counts}
    _current.close()
    seconds = {f"{what}_s": round(value, 3) for what, value in _current.seconds.items()}
    return {"found": _current.found, **counts, **seconds}


class Inductor:
    """torch.compile's default backend, through the cache. It knows options as `torch.compile(options=…)` does."""

    __name__ = "inductor"

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:  # torch compiles again for a different backend
        return isinstance(other, Inductor) and self.options == other.options

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        cache, began = _current, time.perf_counter()
        if cache is None:
            return compile_fx(graph, inputs, config_patches=self.options)

        def in_turn(part: Any, of_part: list[Any], **options: Any) -> Any:
            """Compile the forward or the backward pass. torch calls it for the latter during the first backward."""
            return cache.compile(lambda: compile_fx_inner(part, of_part, **options), lambda: name_of(part, of_part))

        before = dict(cache.seconds)
        compiled = compile_fx(graph, inputs, inner_compile=in_turn, config_patches=self.options)
        if cache.seconds == before:  # both passes were found, before they were traced
            cache.seconds["load"] += time.perf_counter() - began
            cache.store_later()
        return compiled


def recorded() -> list[CacheArtifact]:
    """Return what torch has recorded of all graphs that this process has compiled or loaded."""
    return list(manager()._seen_artifacts)


def manager() -> Any:
    """Return what keeps torch's record of graphs. It is torch's own, and may have another name in the next version."""
    from torch.compiler._cache import CacheArtifactManager, _serialize_single_cache  # noqa: F401 (in `serialize`)

    return CacheArtifactManager


def serialize(artifacts: Iterable[CacheArtifact]) -> bytes:
    """Return what `torch.compiler.load_cache_artifacts` reads: one list of each kind.

    `save_cache_artifacts` called again would append a second list, and torch 2.13 reads only the last one.
    """
    from torch.compiler._cache import _serialize_single_cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer

    by_kind: dict[str, list[CacheArtifact]] = {}
    for artifact in artifacts:
        by_kind.setdefault(artifact.type(), []).append(artifact)
    serializer = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    serializer.extend(by_kind.items())
    return serializer.to_bytes()


def name_of(graph: Any, inputs: Iterable[Any]) -> str:
    """Name a graph: equal on ranks that would compile the same. It only decides who waits; torch has its own keys."""
    digest = hashlib.sha256(graph.code.encode())
    for value in inputs:
        is_tensor = isinstance(value, Tensor)
        kind = (value.dtype, *value.shape, *value.stride(), value.device, value.requires_grad) if is_tensor else value
        digest.update(repr(kind).encode())
    return digest.hexdigest()[:32]


def num_compiled() -> int:
    """Return how many graphs this process has compiled; forward and backward are two."""
    return _counted("fxgraph_cache_miss") + _counted("fxgraph_cache_bypass")


def num_loaded() -> int:
    return _counted("fxgraph_cache_hit")


def _counted(event: str) -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("inductor", {}).get(event, 0))


# ---- what compiled code depends on ---------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return versions and hardware. C++ kernels are compiled for the instructions of this CPU."""
    found: dict[str, Any] = {
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip],
        "triton": version_of("triton"),
        "python": [sys.implementation.name, platform.python_version()],
        "dtrain": source_digest(),
        "cpu": cpu(),
    }
    if torch.cuda.is_available():
        found["gpu"] = [torch.cuda.get_device_name(), *torch.cuda.get_device_capability()]
    return found


def version_of(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu() -> list[str]:
    """Return architecture, name and instruction sets of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(16384).splitlines()  # the first core; the kernel writes the file while it is read
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return [platform.machine(), *(line for line in lines[:64] if line.startswith(wanted))][:6]


def source_digest() -> str:
    """Return a digest of dtrain's own code that is compiled, or decides what is."""
    digest = hashlib.sha256()
    package = Path(dtrain.__file__).parent
    for path in sorted(path for name in SOURCES for path in (package / name).rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# ---- folders and locks ---------------------------------------------------------------------------------------


def shared_folder() -> Path:
    """Return where files are stored: chosen by the user's environment alone, never by a configuration."""
    if given := os.environ.get(VARIABLE):  # perhaps a folder of several users
        return Path(given).expanduser().absolute() / f"dtrain-compiled-{os.geteuid()}"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtrain" / "compiled"


@contextlib.contextmanager
def locked(path: Path, most_s: float = 60.0) -> Iterator[None]:
    """Hold a lock among the processes of this machine; the kernel frees it if one ends. After `most_s`, do without."""
    with open(path, "ab") as file:
        deadline, pause = time.monotonic() + most_s, 0.001
        while not _lock(file) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        yield


def _lock(file: IO[bytes]) -> bool:
    """Take the lock; false if another process has it. A file system without locks has no other process waiting."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
