"""Kubernetes through its official Python client: create, query, read logs and delete. Only this file imports it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from dtrain.errors import bad
from dtrain.runs.protocol import PREEMPTED
from dtrain.runs.slurm_queue import Job
from dtrain.util.format import as_dict, clean

RUN_LABEL = "dtrain/run"  # of each object and pod: the name of the job
ANSWER_S = 10  # seconds for one request
# kind → group, version and plural in the API's addresses, and the kind in a manifest
KINDS = {
    "job": ("batch", "v1", "jobs", "Job"),
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    "pytorchjob": ("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    "trainingruntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime"),
}
JOB_ID = re.compile(r"(job|jobset|pytorchjob|trainjob)/([a-z0-9-]+)/([a-z0-9-]+)")  # KIND/NAMESPACE/NAME


class NoAnswer(Exception):
    """The API server cannot be reached, or refused the request."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """A connection to one cluster. context: of the kubeconfig; None: the current one, or the pod's own cluster."""

    def __init__(self, context: str | None = None) -> None:
        try:
            import kubernetes
        except ImportError:
            fix = "pip install 'dtrain[kubernetes]'; --dry-run works without it"
            raise bad("cluster", "kubernetes", "the package kubernetes is not installed", fix) from None
        self.kubernetes, self.namespace = kubernetes, "default"
        loader = kubernetes.config
        try:
            if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                loader.load_incluster_config()
                with (
                    contextlib.suppress(OSError),
                    open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file,
                ):
                    self.namespace = file.read().strip()
            else:
                contexts, current = loader.list_kube_config_contexts()
                chosen = next((c for c in contexts if c["name"] == context), current)
                self.namespace = as_dict(chosen.get("context")).get("namespace") or "default"
                loader.load_kube_config(context=context)
        except loader.ConfigException as error:
            why = f"no cluster can be reached with it ({' '.join(str(error).split())})"
            raise bad("cluster.context", context, why, "kubectl config get-contexts lists yours") from None
        client = kubernetes.client.ApiClient()
        self.objects = kubernetes.client.CustomObjectsApi(client)  # of any kind, those of Kubernetes itself, too
        self.core = kubernetes.client.CoreV1Api(client)

    def create(self, manifest: dict[str, Any], namespace: str, dry_run: bool = False) -> dict[str, Any]:
        """Create an object. dry_run: only ask whether the server would accept it. Unknown fields are refused."""
        options = {"field_validation": "Strict", "_request_timeout": ANSWER_S} | ({"dry_run": "All"} if dry_run else {})
        with answers():
            if manifest["kind"] == "ConfigMap":
                made = self.core.create_namespaced_config_map(namespace, manifest, **options)
                return dict(made.to_dict())
            group, version, plural, _ = KINDS[manifest["kind"].lower()]
            return dict(
                self.objects.create_namespaced_custom_object(group, version, namespace, plural, manifest, **options)
            )

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object and its pods, which get a stop signal first. One that is gone already is no error."""
        group, version, plural, _ = KINDS[kind]
        options = {"propagation_policy": "Background", "_request_timeout": ANSWER_S}
        try:
            with answers():
                self.objects.delete_namespaced_custom_object(group, version, namespace, plural, name, **options)
        except NoAnswer as error:
            if error.code != 404:
                raise

    def job(self, job_id: str) -> Job:
        """Return the state of a job as its object and its pods tell it, in SLURM's words."""
        found = JOB_ID.fullmatch(job_id)
        assert found is not None
        group, version, plural, _ = KINDS[found[1]]
        try:
            with answers():
                made = self.objects.get_namespaced_custom_object(
                    group, version, found[2], plural, found[3], _request_timeout=ANSWER_S
                )
        except NoAnswer as error:
            if error.code == 404:
                return Job(job_id, "GONE")
            raise
        return state(job_id, as_dict(made), self.pods(found[2], found[3]))

    def pods(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """Return the pods of a job as plain values, in the order of their nodes, the newest of a node last."""
        with answers():
            listed = self.core.list_namespaced_pod(
                namespace, label_selector=f"{RUN_LABEL}={name}", _request_timeout=ANSWER_S, _preload_content=False
            )
        pods = [as_dict(pod) for pod in as_dict(json.loads(listed.data)).get("items") or []]
        return sorted(pods, key=lambda pod: (node_rank(pod), str(as_dict(pod["metadata"]).get("creationTimestamp"))))

    def log(
        self, namespace: str, pod: dict[str, Any], lines: int | None = None, follow: bool = False
    ) -> Iterator[bytes]:
        """Yield the lines of a pod's log; of its preflight, if that has failed or still runs."""
        status = as_dict(pod.get("status"))
        main = [c for c in status.get("containerStatuses") or [] if not as_dict(c.get("state")).get("waiting")]
        chosen = (main or status.get("initContainerStatuses") or [{}])[0].get("name")
        options: dict[str, Any] = {"tail_lines": lines} if lines is not None else {}
        with answers():
            stream = self.core.read_namespaced_pod_log(
                pod["metadata"]["name"], namespace, **({"container": chosen} if chosen else {}), **options,
                follow=follow, _preload_content=False, _request_timeout=None if follow else ANSWER_S,
            )  # fmt: skip
            rest = b""
            for part in stream.stream():
                *whole, rest = (rest + part).split(b"\n")
                yield from whole
            if rest:
                yield rest


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """Turn the client's many errors into NoAnswer with one line."""
    from kubernetes.client.exceptions import ApiException, OpenApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = ""
        with contextlib.suppress(ValueError, TypeError):
            message = str(as_dict(json.loads(error.body)).get("message") or "")
        text = clean(" ".join((message or str(error.reason or "")).split()))
        raise NoAnswer(text or f"HTTP status {error.status}", error.status) from None
    except (HTTPError, OpenApiException, OSError, ValueError) as error:
        raise NoAnswer(f"no answer of the API server: {clean(' '.join(str(error).split()))[:300]}") from None


def node_rank(pod: dict[str, Any]) -> int:
    """Return the number of a pod's node; -1: not known."""
    meta = as_dict(pod.get("metadata"))
    labels = as_dict(meta.get("labels")) | as_dict(meta.get("annotations"))
    number = str(labels.get("batch.kubernetes.io/job-completion-index", ""))
    if not number.isdigit() and "training.kubeflow.org/replica-index" in labels:
        of_workers = labels.get("training.kubeflow.org/replica-type") == "worker"
        number = str(int(labels["training.kubeflow.org/replica-index"]) + of_workers)
    return int(number) if number.isdigit() else -1


def state(job_id: str, made: dict[str, Any], pods: list[dict[str, Any]]) -> Job:
    status = as_dict(made.get("status"))
    true = {c.get("type"): c for c in status.get("conditions") or [] if c.get("status") == "True"}
    newest = {node_rank(pod): pod for pod in pods}.values()
    phases = [as_dict(pod.get("status")).get("phase") for pod in newest]
    word, reason = "PENDING", ""
    if true.keys() & {"Complete", "Completed", "Succeeded"}:
        word = "COMPLETED"
    elif "Failed" in true:
        word, reason = "FAILED", ": ".join(str(true["Failed"].get(key) or "") for key in ("reason", "message"))
    elif "Suspended" in true:
        reason = "suspended"
    elif "Running" in phases:
        word = "RUNNING"
    else:
        reason = next(filter(None, map(waits_for, newest)), "no pod yet" if not pods else "")
    nodes = [str(as_dict(pod.get("spec")).get("nodeName") or "") for pod in newest]
    made_at, began = (
        epoch(x) for x in (as_dict(made.get("metadata")).get("creationTimestamp"), status.get("startTime"))
    )
    return Job(
        job_id, word, clean(reason)[:300], ",".join(filter(None, nodes)), submitted=made_at, started=began,
        exit=next((f"{code}:0" for code in exit_codes(pods)), None) if word == "FAILED" else None,
    )  # fmt: skip


def waits_for(pod: dict[str, Any]) -> str:
    """Say why a pod has not started: no node has room for it, or its image is not there."""
    status = as_dict(pod.get("status"))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = as_dict(as_dict(container.get("state")).get("waiting"))
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message') or container.get('image')}"
    return ""


def exit_codes(pods: Iterable[dict[str, Any]]) -> list[int]:
    """Return the exit codes of containers that have failed, the first one first; those that were only stopped, last."""
    found = []
    for pod in pods:
        status = as_dict(pod.get("status"))
        for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
            ended = as_dict(as_dict(container.get("state")).get("terminated"))
            if ended.get("exitCode"):
                code = int(ended["exitCode"])
                found.append((code == PREEMPTED, str(ended.get("finishedAt")), code))
    return [code for *_, code in sorted(found)]


def epoch(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def query(job_ids: Iterable[tuple[str, str | None]]) -> tuple[dict[str, Job], str]:
    """Return the jobs by (id, context), and why the last cluster that gave no answer did not."""
    found, problem = {}, ""
    connections: dict[str | None, Api | str] = {}
    for job_id, context in job_ids:
        if context not in connections:
            try:
                connections[context] = Api(context)
            except ValueError as error:  # no client, or no such context
                connections[context] = str(error).partition("\n")[0]
        api = connections[context]
        if isinstance(api, str):
            problem = api
            continue
        try:
            found[job_id] = api.job(job_id)
        except NoAnswer as error:
            problem = connections[context] = str(error)
    return found, problem
