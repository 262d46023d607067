"""Sweeps: the points of an `-m` command, the folder of an earlier sweep, and its unfinished points."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from hydra.conf import HydraConf
from omegaconf import DictConfig, open_dict, read_write

from dtrain.config.build import typed_trust
from dtrain.config.files import CODE
from dtrain.errors import bad
from dtrain.launch import compose_cache
from dtrain.launch.cluster import build_cluster
from dtrain.runs import record as records
from dtrain.runs.folder import last_launch, read_json, write_json
from dtrain.ui.sweep_table import SWEEP as SWEEP
from dtrain.util.format import as_dict

LOCK = ".lock"  # held by the command that is working in the folder
AUTOMATIC = ("hydra.sweep.dir=", "hydra.job.config.override_dirname.exclude_keys=")  # overrides added by dtrain
TO_DO = ("failed", "died", "cancelled", "preempted")  # statuses that the same command resumes


def known_before(hydra: HydraConf) -> bool:
    """Are all points known before the first one starts? A searching sweeper chooses them one by one."""
    return str(hydra.sweeper._target_).endswith("BasicSweeper")


def jobs_of(config: DictConfig) -> Iterator[DictConfig]:
    """Yield the configuration of each job of a sweep, including its run folder."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    loader = GlobalHydra.instance().config_loader()
    compose_cache.cache_jobs(loader)
    overrides = OverridesParser.create(loader).parse_overrides(list(config.hydra.overrides.task))
    folder = Path(config.hydra.sweep.dir)  # read from the sweeper's config, where ${now:} is resolved
    jobs = [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]
    seen: set[str] = set()
    for number, job in enumerate(jobs):
        cfg = loader.load_sweep_config(config, list(job))
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.job.num = number
            cfg.run_dir = str(folder / cfg.hydra.sweep.subdir)
        if cfg.run_dir in seen:
            raise bad(
                "hydra.sweep.subdir",
                cfg.hydra.sweep.subdir,
                "two jobs would have the same folder",
                "hydra.sweep.subdir='${hydra.job.num}'",
            )
        seen.add(cfg.run_dir)
        yield cfg


def typed(argv: Sequence[str]) -> list[str]:
    """Return the arguments that identify a sweep: all except those for its location."""
    return [a for a in argv if a not in ("-m", "--multirun") and not a.startswith(AUTOMATIC)]


def earlier(argv: Sequence[str], root: Path = Path("multirun")) -> Path | None:
    """Return the newest sweep started with the same arguments, so that the same command resumes it."""
    found = [p for p in root.glob(f"*/*/{SWEEP}") if read_json(p).get("arguments") == typed(argv)]
    return max(found, key=lambda p: p.stat().st_mtime).parent if found else None


def lock(folder: Path) -> TextIO:
    """Lock a sweep's folder while its points are prepared and submitted; a second command would run them twice."""
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o700)  # created by us; an existing folder keeps its mode
    file = open(folder / LOCK, "a")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise bad("hydra.sweep.dir", folder, "another command is using this folder", f"dtrain runs {folder}") from None
    return file


def note(folder: Path, argv: Sequence[str], jobs: Sequence[DictConfig] = ()) -> None:
    """Write what the sweep consists of: the same command resumes it, and its table lists what has not begun."""
    points = {Path(job.run_dir).name: list(job.hydra.overrides.task) for job in jobs}
    write_json(folder / SWEEP, {"arguments": typed(argv), "points": points})


def place(run_dir: Path) -> str:
    """`job 2 of 4`, for a point of a sweep that was known before; otherwise ""."""
    names = list(as_dict(read_json(run_dir.parent / SWEEP).get("points")))
    return f"job {names.index(run_dir.name) + 1} of {len(names)}" if run_dir.name in names else ""


def points(folder: Path) -> list[Path]:
    """Return the run folders of a sweep in job order: 2-… before 10-…"""
    return sorted((p.parent for p in folder.glob("*/launch.json")), key=lambda p: (len(p.name.split("-")[0]), p.name))


def unfinished(run_dir: Path) -> bool:
    """Did the point end early, with no queued job that would resume it?"""
    (record,), problem = records.load([run_dir], ask_all=True)
    if record.job_id and record.job is None and not record.is_final:
        rule = f"cannot tell whether its job {record.job_id} is still queued ({problem or 'no SLURM commands here'})"
        raise bad("hydra.sweep.dir", run_dir.parent, f"{run_dir.name}: {rule}", "try again where squeue answers")
    return record.status in TO_DO and (record.job is None or record.job.ended)


def submit(folder: Path, asked: Sequence[dict[str, Any]] | None = None) -> list[str]:
    """Submit prepared points that are not queued yet: one array per distinct cluster request.

    asked: the cluster settings of this command, if known; a point with other settings belongs to someone else.
    """
    waiting: dict[str, list[Path]] = {}
    for run_dir in points(folder):
        launch = last_launch(read_json(run_dir / "launch.json"))
        if launch.get("prepared"):
            code = [key for key in CODE if launch["cluster"].get(key)]
            if code if asked is None else launch["cluster"] not in asked:
                rule = f"{run_dir.name} was prepared there for a different cluster and not submitted"
                raise bad("hydra.sweep.dir", folder, rule, "use another folder, or delete that run folder")
            waiting.setdefault(json.dumps(launch["cluster"], sort_keys=True), []).append(run_dir)
    ids = []
    for cluster, run_dirs in waiting.items():
        ids += build_cluster(json.loads(cluster), typed_trust()).submit(run_dirs, folder)
    return ids
