"""A small stand-in for a Kubernetes cluster: an API server for the official client, and pods that are local processes.

It checks what is created against the published schemas, runs init containers and containers with their environment,
ConfigMaps and signals, and follows podFailurePolicy, backoffLimit, JobSet's failurePolicy and PyTorchJob's exit codes
as documented. Volumes are not mounted: tests choose mount paths that exist. It is no Kubernetes: it has no scheduler,
no quotas, no admission, and no network between pods.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from dtrain.runs.protocol import die_with_parent
from tests.kubernetes_schemas import problems
from tests.launch.test_local import listen_to_signals
from tests.world import ROOT


class Pod:
    """One pod: its init containers, one after the other, then its container, as processes."""

    def __init__(self, cluster: Cluster, name: str, rank: int, template: dict[str, Any], env: dict[str, str]) -> None:
        self.name, self.rank, self.template, self.made = name, rank, template, now()
        self.phase, self.code, self.stopping = "Pending", None, False  # type: ignore[assignment]
        self.process: subprocess.Popen[bytes] | None = None
        self.logs: dict[str, Path] = {}
        self.codes: dict[str, int | None] = {}
        self.cluster, self.env = cluster, env
        self.code: int | None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        spec = self.template["spec"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        shared = next(v["configMap"]["name"] for v in volumes.values() if "configMap" in v)
        while shared not in self.cluster.config_maps:
            time.sleep(0.05)  # ContainerCreating
        files = self.cluster.folder / self.name
        (files / "..2026").mkdir(parents=True)  # the layout of a ConfigMap's volume: links to links
        (files / "..data").symlink_to("..2026")
        for key, text in self.cluster.config_maps[shared]["data"].items():
            (files / "..2026" / key).write_text(text)
            (files / key).symlink_to(f"..data/{key}")
        self.phase = "Running"
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            code = self.start(container, files)
            self.codes[container["name"]] = code
            if code:
                break
        self.code, self.phase = code, "Failed" if code else "Succeeded"

    def start(self, container: dict[str, Any], files: Path) -> int:
        (config,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config")
        argv = [str(files) if word == config else word for word in container["command"]]
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.cluster.folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                env[variable["name"]] = self.cluster.secrets[source["secretKeyRef"]["name"]][
                    source["secretKeyRef"]["key"]
                ]
            else:
                env[variable["name"]] = variable.get("value", "127.0.0.1")
        self.logs[container["name"]] = log = self.cluster.folder / f"{self.name}-{container['name']}.log"
        self.codes[container["name"]] = None
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                argv, env=env | self.env, cwd=self.cluster.folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                preexec_fn=prepare,
            )  # fmt: skip
        if self.stopping:
            self.process.terminate()
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        self.stopping = True
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        def of(container: dict[str, Any]) -> dict[str, Any]:
            code = self.codes.get(container["name"], "waiting")
            state: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}
            if code != "waiting":
                state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "finishedAt": now()}}
            return {"name": container["name"], "state": state}

        spec = self.template["spec"]
        found = {"phase": self.phase, "containerStatuses": [of(c) for c in spec["containers"]]}
        return found | {"initContainerStatuses": [of(c) for c in spec.get("initContainers", [])]}

    def to_json(self) -> dict[str, Any]:
        labels = self.template["metadata"]["labels"] | {"batch.kubernetes.io/job-completion-index": str(self.rank)}
        meta = {"name": self.name, "labels": labels, "creationTimestamp": self.made}
        return {"metadata": meta, "spec": {"nodeName": f"node-{self.rank}"}, "status": self.status()}


class Controller(threading.Thread):
    """What a Job, a JobSet, a PyTorchJob or a TrainJob does with its pods."""

    def __init__(self, cluster: Cluster, document: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.document, self.pods = cluster, document, list[Pod]()
        self.deleted, self.conditions, self.counted = False, list[dict[str, Any]](), 0
        kind, spec = document["kind"], document["spec"]
        if kind == "TrainJob":
            spec = cluster.objects["trainingruntimes", spec["runtimeRef"]["name"]].document["spec"]["template"]["spec"]
        self.rules, self.limit, self.variable = [], 0, "JOB_COMPLETION_INDEX"
        if kind == "PyTorchJob":
            replicas = spec["pytorchReplicaSpecs"]
            self.templates = [r["template"] for r in replicas.values() for _ in range(r["replicas"])]
            self.variable = "RANK"
        else:
            job = spec
            if kind != "Job":
                job = spec["replicatedJobs"][0]["template"]["spec"]
                self.limit = spec["failurePolicy"]["maxRestarts"]
            self.rules, self.limit = job["podFailurePolicy"]["rules"], self.limit + job["backoffLimit"]
            self.templates = [job["template"]] * job["completions"]
        self.restarts_all = kind not in ("Job", "PyTorchJob")

    def run(self) -> None:
        current = [self.new(rank) for rank in range(len(self.templates))]
        while not self.deleted:
            for rank, pod in enumerate(current):
                if pod.phase == "Failed":
                    action = self.action(pod.code or 0)
                    self.counted += action == "Count"
                    if action == "FailJob" or self.counted > self.limit:
                        reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
                        return self.end(current, "Failed", reason)
                    if action == "Count" and self.restarts_all:
                        stop_all(current)
                        current = [self.new(rank) for rank in range(len(self.templates))]
                        break
                    current[rank] = self.new(rank)
            if all(pod.phase == "Succeeded" for pod in current):
                return self.end(
                    current, {"Job": "Complete", "JobSet": "Completed"}.get(self.document["kind"], "Succeeded")
                )
            time.sleep(0.05)
        stop_all(current)

    def action(self, code: int) -> str:
        if self.document["kind"] == "PyTorchJob":
            return "Ignore" if code >= 128 else "FailJob"
        found = [rule["action"] for rule in self.rules if code in rule.get("onExitCodes", {}).get("values", [])]
        return found[0] if found else "Count"

    def new(self, rank: int) -> Pod:
        name = f"{self.document['metadata']['name']}-{rank}-{uuid.uuid4().hex[:5]}"
        self.pods.append(Pod(self.cluster, name, rank, self.templates[rank], {self.variable: str(rank)}))
        return self.pods[-1]

    def end(self, current: list[Pod], condition: str, reason: str = "") -> None:
        stop_all(current)
        self.conditions = [{"type": condition, "status": "True", "reason": reason, "message": "fake"}]

    def to_json(self) -> dict[str, Any]:
        return self.document | {"status": {"conditions": self.conditions, "startTime": now()}}


def prepare() -> None:
    listen_to_signals()
    die_with_parent()  # a test that is killed leaves no pod


def stop_all(pods: list[Pod]) -> None:
    for pod in pods:
        pod.stop()
    for pod in pods:
        pod.thread.join(60)


class Cluster:
    """The cluster, as a context; `kubeconfig` is the file by which clients find it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config_maps, self.objects = folder, dict[str, Any](), dict[tuple[str, str], Any]()
        self.secrets: dict[str, dict[str, str]] = {}
        self.ended: list[Controller] = []
        folder.mkdir()

    def __enter__(self) -> Cluster:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"cluster": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.kubeconfig = self.folder / "kubeconfig"
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": address}}],
            "users": [{"name": "me", "user": {"token": "x"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": "lab"}}],
        }  # fmt: skip
        self.kubeconfig.write_text(yaml.safe_dump(content))
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        for controller in self.controllers():
            controller.deleted = True
            for pod in controller.pods:
                if pod.process and pod.process.poll() is None:
                    pod.process.kill()
                    pod.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def controllers(self) -> list[Controller]:
        return [*(c for c in self.objects.values() if isinstance(c, Controller)), *self.ended]

    def pods(self) -> list[Pod]:
        return [pod for controller in self.controllers() for pod in controller.pods]


class Handler(BaseHTTPRequestHandler):
    """The few requests that dtrain makes."""

    cluster: Cluster

    def log_message(self, *_: object) -> None: ...

    def answer(self, code: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, code: int, message: str) -> None:
        self.answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def place(self) -> tuple[str, str, dict[str, str]]:
        address = urlsplit(self.path)
        _, _, rest = address.path.partition("/namespaces/")
        plural, _, name = rest.partition("/")[2].partition("/")
        return plural, name, {key: values[0] for key, values in parse_qs(address.query).items()}

    def do_POST(self) -> None:
        plural, _, options = self.place()
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = document["metadata"]["name"]
        if options.get("fieldValidation") != "Strict":
            return self.refuse(400, "the client must ask for strict validation")
        if wrong := problems(document):
            return self.refuse(422, f"invalid: {wrong[0]}")
        if (plural, name) in self.cluster.objects:
            return self.refuse(409, f"{plural} {name} already exists")
        document["metadata"]["uid"] = str(uuid.uuid4())
        document["metadata"]["creationTimestamp"] = now()
        if options.get("dryRun") != "All":
            if plural == "configmaps":
                self.cluster.config_maps[name] = document
            elif plural == "trainingruntimes":
                self.cluster.objects[plural, name] = type(
                    "Runtime", (), {"document": document, "to_json": lambda s: s.document}
                )()
            else:
                self.cluster.objects[plural, name] = controller = Controller(self.cluster, document)
                controller.start()
        self.answer(201, document)

    def do_GET(self) -> None:
        plural, name, options = self.place()
        if plural == "pods" and name.endswith("/log"):
            return self.log(name.removesuffix("/log"), options)
        if plural == "pods":
            wanted = options["labelSelector"].partition("=")[2]
            found = [
                p.to_json() for p in self.cluster.pods() if p.template["metadata"]["labels"]["dtrain/run"] == wanted
            ]
            return self.answer(200, {"kind": "PodList", "items": found})
        if (plural, name) not in self.cluster.objects:
            return self.refuse(404, f"{plural} {name} not found")
        self.answer(200, self.cluster.objects[plural, name].to_json())

    def log(self, name: str, options: dict[str, str]) -> None:
        (pod,) = (p for p in self.cluster.pods() if p.name == name)
        while options.get("follow") == "true" and pod.phase in ("Pending", "Running"):
            time.sleep(0.05)
        text = pod.logs[options["container"]].read_bytes() if options["container"] in pod.logs else b""
        if "tailLines" in options:
            text = b"".join(text.splitlines(keepends=True)[-int(options["tailLines"]) :])
        self.answer(200, text)

    def do_DELETE(self) -> None:
        plural, name, _ = self.place()
        gone = self.cluster.objects.pop((plural, name), None)
        if gone is None:
            return self.refuse(404, f"{plural} {name} not found")
        if isinstance(gone, Controller):
            gone.deleted = True
            self.cluster.ended.append(gone)
        self.answer(200, {"kind": "Status", "status": "Success"})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
