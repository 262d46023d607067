"""Launch on Kubernetes: create what manifest.py describes, and return; the pods run dtrain/launch/pod.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dtrain.checks import kubernetes as checks
from dtrain.checks import profile as profiling
from dtrain.config import run_file
from dtrain.errors import bad
from dtrain.launch import manifest
from dtrain.launch.failures import failure
from dtrain.runs import folder
from dtrain.runs.folder import read_json, write_json
from dtrain.runs.kubernetes_api import KINDS, Api, NoAnswer
from dtrain.util.format import counted, shell_path


class Kubernetes:
    """Submits to a Kubernetes cluster, or prints a compose file."""

    def __init__(
        self,
        kind: Literal["job", "jobset", "pytorchjob", "trainjob", "compose"] = "job",
        nodes: int = 1,
        gpus_per_node: int = 0,
        processes: int | None = None,
        image: str | None = None,
        python: str = "python",
        context: str | None = None,
        namespace: str | None = None,
        cpus: int | None = None,
        mem: str | None = None,
        shm: str | None = None,
        resources: dict[str, Any] | None = None,
        volumes: list[str] | None = None,
        run_root: str | None = None,
        env: dict[str, Any] | None = None,
        secret_env: list[str] | None = None,
        service_account: str | None = None,
        priority_class: str | None = None,
        node_selector: dict[str, Any] | None = None,
        tolerations: list[dict[str, Any]] | None = None,
        topology: str | None = None,
        pod: dict[str, Any] | None = None,
        ttl_s: int | None = 604800,
        max_restarts: int = 0,
        max_idle_starts: int = 3,
        grace_s: int = 300,
        start_s: int = 600,
        hang_timeout: float | None = None,
        on_hang: Literal["stop", "warn"] = "stop",
        system_metrics_every: float = 5,
        metrics_port: int | None = None,
        metrics_host: str = "0.0.0.0",
        fabric: dict[str, Any] | None = None,
    ) -> None:
        self.kind, self.nodes, self.processes, self.namespace, self.context = kind, nodes, processes, namespace, context

    # ---- called by launch/app.py -----------------------------------------------------------------------------

    def check(self, config: dict[str, Any]) -> None:
        """Check the settings, and ask the API server whether it would accept the job, before anything is written."""
        profiling.check_machine(config)
        checks.check(config["cluster"])
        if config.get("nsys"):
            raise bad("nsys", "true", "is not there on Kubernetes", "cluster=local, or profile=torch")
        if config["preflight"]["level"] == "full" and self.nodes > 1:
            rule = "each pod checks itself, and full also measures between the pods"
            raise bad("preflight", "full", rule, "preflight=quick")
        made = self._documents(config, Path(config["run_dir"]))
        if config["dry_run"]:
            return
        if self.kind == "compose":
            raise bad("cluster.kind", "compose", "is only printed", "--dry-run > compose.yaml; docker compose up")
        with self._explained():
            api = Api(self.context)
            for document in made:
                if document["kind"] != "TrainJob":  # refused without its runtime, which is not there yet
                    api.create(document, self.namespace or api.namespace, dry_run=True)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        print(f"---\n{manifest.to_yaml(*self._documents(config, run_dir))}", end="")  # one after the other in a sweep

    def launch(self, run_dir: Path) -> int:
        """Submit the job, print how to monitor and cancel it, and return at once."""
        (job_id,) = self.submit([run_dir], run_dir)
        run = shell_path(run_dir)
        with contextlib.suppress(BrokenPipeError):  # `| head`: the job is submitted anyway
            print(
                f"submitted {job_id} · {counted(self.nodes, 'pod')} × {counted(self.processes, 'rank')}\n"
                f"status    dtrain status {run}\n"
                f"logs      dtrain logs -f {run}\n"
                f"cancel    dtrain cancel {run}",
                flush=True,
            )
        return 0

    # ---- submission ------------------------------------------------------------------------------------------

    def submit(self, run_dirs: Sequence[Path], folder: Path, name: str | None = None) -> list[str]:
        """Submit one job for each run, and write its id to launch.json."""
        return [self._submit(run_dir) for run_dir in run_dirs]

    def _submit(self, run_dir: Path) -> str:
        config = run_file.load(run_dir)
        api = Api(self.context)
        namespace = self.namespace or api.namespace
        record = read_json(run_dir / "launch.json")
        name = manifest.job_name(config, len(record["launches"]))
        job_id = f"{self.kind}/{namespace}/{name}"
        record["launches"][-1]["job_id"] = job_id
        record["launches"][-1].pop("prepared", None)
        write_json(run_dir / "launch.json", record)
        (run_dir / "preflight.json").unlink(missing_ok=True)  # of an earlier launch
        made = self._documents(config, run_dir, record)
        try:
            with self._explained():
                create(api, made, namespace)
        except ValueError as error:
            record["launches"][-1].pop("job_id")
            write_json(run_dir / "launch.json", record)
            why = " ".join(str(error).split())
            write_json(run_dir / "failure.json", failure(None, "submission", why, "manifest.yaml"))
            raise
        finally:
            (run_dir / "manifest.yaml").write_text(manifest.to_yaml(*made))
        return job_id

    def _documents(
        self, config: dict[str, Any], run_dir: Path, record: dict[str, Any] | None = None
    ) -> list[manifest.Manifest]:
        """Return what to create. record: launch.json, if this launch is written there already; else one like it."""
        before = read_json(run_dir / "launch.json").get("launches") or []
        name = manifest.job_name(config, len(before) + (record is None))
        if record is None:
            record = manifest.launch_record(config, f"{self.kind}/{self.namespace or 'default'}/{name}")
        newest = record["launches"][-1]
        in_pods = newest | {"cluster": newest["cluster"] | {"run_root": None}}  # for readers that mount the volume
        files = {"launch.json": record | {"launches": [*record["launches"][:-1], in_pods]}}
        if plan := read_json(run_dir / folder.PLAN):
            files[folder.PLAN] = plan
        if self.kind == "compose":
            return [manifest.compose(config, name, files)]
        return manifest.manifests(config, name, files)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a refusal of the API server into an error with a fix."""
        try:
            yield
        except NoAnswer as error:
            if error.code == 404:
                what = KINDS[self.kind][3]
                rule = f"this cluster has no {what}, or no namespace {self.namespace} ({error})"
                fix = "kubectl api-resources; cluster.kind=job is always there"
                raise bad("cluster.kind", self.kind, rule, fix) from None
            text = f"Kubernetes refuses the job: {error}"
            raise ValueError(
                f"cluster: {text}\n  fix: --dry-run shows the manifest; kubectl auth can-i create jobs"
            ) from None


def create(api: Api, documents: Sequence[manifest.Manifest], namespace: str) -> None:
    """Create all, or none. The ConfigMap comes last and belongs to the job: it is deleted with it."""
    shared, *others = documents
    made: list[manifest.Manifest] = []
    try:
        for document in others:
            made.append(api.create(document, namespace))
        main = others[-1]
        owner = {"apiVersion": main["apiVersion"], "kind": main["kind"], "name": main["metadata"]["name"]}
        owner["uid"] = made[-1]["metadata"]["uid"]
        api.create(shared | {"metadata": shared["metadata"] | {"ownerReferences": [owner]}}, namespace)
    except NoAnswer:
        for document in others[: len(made)]:
            with contextlib.suppress(NoAnswer):
                api.delete(document["kind"].lower(), namespace, document["metadata"]["name"])
        raise
