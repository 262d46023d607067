"""From a resolved configuration to manifests for Kubernetes, or to a compose file: pure functions of plain values.

One pod a node. The configuration travels as a ConfigMap, and each pod runs `python -m dtrain.launch.pod`, which starts
the ranks of its node. Kubernetes decides by a pod's exit code whether the run is started again:

    75 (stopped, saved)                   again, and it does not count
    2 (bad configuration), 4 (preflight)  never again
    anything else                         again, cluster.max_restarts times
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from dtrain.checks import kubernetes as checks
from dtrain.config import redaction
from dtrain.config.build import TRUST, typed_trust
from dtrain.config.files import is_script, over
from dtrain.launch.script_rank import identity
from dtrain.runs.kubernetes_api import RUN_LABEL
from dtrain.runs.protocol import BAD_CONFIG, NODE_RANK, POD_IP, PREEMPTED, PREFLIGHT, RUN_FILES, SCRIPT_TYPED

Manifest = dict[str, Any]
FILES = "/etc/dtrain"  # where a pod finds the run's configuration
COMPOSE_SHM = "2Gi"  # unless cluster.shm says more: a container's usual 64 MiB are too few for loaders and gloo
LONGEST_NAME = 40  # Kubernetes adds a pod's number and a random suffix, and a host name has at most 63 characters
NODE = "node"  # the container; also the replicated job, as Kubeflow's trainer wants it


def job_name(config: dict[str, Any], num_launches: int) -> str:
    """Return a name that is valid and unique: the name of the run, and a digest of its folder and of its launch."""
    plain = re.sub(r"[^a-z0-9]+", "-", str(config["name"]).lower()).strip("-")[: LONGEST_NAME - 9].strip("-")
    digest = hashlib.sha256(f"{config['run_dir']} {num_launches}".encode()).hexdigest()[:8]
    return f"{plain if plain[:1].isalpha() else f'run-{plain}'.strip('-')}-{digest}"


def manifests(config: dict[str, Any], name: str, files: dict[str, Any]) -> list[Manifest]:
    """Return what to create, in this order. files: JSON files beside config.yaml, by name."""
    cluster = config["cluster"]
    labels = {"app.kubernetes.io/managed-by": "dtrain", RUN_LABEL: name}
    meta = {"name": name, "labels": labels} | ({"namespace": cluster["namespace"]} if cluster["namespace"] else {})
    texts = texts_of(config, files)
    shared: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": texts}
    template = {"metadata": {"labels": labels}, "spec": pod_spec(config, name)}
    made = [shared, *KINDS[cluster["kind"]](cluster, meta, template)]
    redaction.check(made)  # no value of a secret variable of this machine, whichever way it came here
    return made


def texts_of(config: dict[str, Any], files: dict[str, Any]) -> dict[str, str]:
    """Return the files that the pods get."""
    texts = {"config.yaml": to_yaml(in_pods(config))}
    return texts | {name: json.dumps(redaction.redact(content)) for name, content in files.items()}


def in_pods(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as the pods read it, without secrets."""
    here = {"run_dir": str(checks.pods_run_dir(config)), "resume": None, "dry_run": False}
    return dict(redaction.redact(config | here | {"cluster": config["cluster"] | {"run_root": None}}))


# ---- kinds ---------------------------------------------------------------------------------------------------


def job(cluster: dict[str, Any], meta: Manifest, template: Manifest) -> list[Manifest]:
    spec = job_spec(cluster, template, cluster["max_restarts"]) | after_end(cluster)
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}]


def jobset(cluster: dict[str, Any], meta: Manifest, template: Manifest) -> list[Manifest]:
    spec = jobset_spec(cluster, template) | after_end(cluster)
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}]


def pytorchjob(cluster: dict[str, Any], meta: Manifest, template: Manifest) -> list[Manifest]:
    """The operator starts pods again that end with 128 or more, without a count; dtrain.launch.pod knows that."""

    def replicas(count: int) -> Manifest:
        return {"replicas": count, "restartPolicy": "ExitCode", "template": template}

    replica_specs = {"Master": replicas(1)}
    if cluster["nodes"] > 1:
        replica_specs["Worker"] = replicas(cluster["nodes"] - 1)
    spec = {"pytorchReplicaSpecs": replica_specs, "runPolicy": {"cleanPodPolicy": "None"} | after_end(cluster)}
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": meta, "spec": spec}]


def trainjob(cluster: dict[str, Any], meta: Manifest, template: Manifest) -> list[Manifest]:
    """A TrainJob describes no pods: it refers to a runtime, which is therefore made for this run."""
    version = "trainer.kubeflow.org/v1alpha1"
    spec = jobset_spec(cluster, template)
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    runtime = {"mlPolicy": {"numNodes": cluster["nodes"]}, "template": {"spec": spec}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": meta["name"]}
    train = {"runtimeRef": reference, "trainer": {"numNodes": cluster["nodes"]}}
    return [
        {"apiVersion": version, "kind": "TrainingRuntime", "metadata": meta, "spec": runtime},
        {"apiVersion": version, "kind": "TrainJob", "metadata": meta, "spec": train},
    ]


KINDS = {"job": job, "jobset": jobset, "pytorchjob": pytorchjob, "trainjob": trainjob}


def job_spec(cluster: dict[str, Any], template: Manifest, max_restarts: int) -> Manifest:
    rules: list[Manifest] = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [BAD_CONFIG, PREFLIGHT]}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},  # drained, preempted
    ]
    return {
        "completionMode": "Indexed",
        "completions": cluster["nodes"],
        "parallelism": cluster["nodes"],
        "backoffLimit": max_restarts,
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }


def jobset_spec(cluster: dict[str, Any], template: Manifest) -> Manifest:
    """After a failure, all pods start again at once; after one that no restart mends, none."""
    rule = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job_spec(cluster, template, 0)}}],
        "failurePolicy": {"maxRestarts": cluster["max_restarts"], "rules": [rule]},
    }


def after_end(cluster: dict[str, Any]) -> Manifest:
    return {} if cluster["ttl_s"] is None else {"ttlSecondsAfterFinished": cluster["ttl_s"]}


# ---- pods ----------------------------------------------------------------------------------------------------


def pod_spec(config: dict[str, Any], name: str) -> Manifest:
    cluster = config["cluster"]
    claims = checks.mounts(cluster["volumes"])
    names = list(dict.fromkeys(claim for claim, _, _ in claims))
    memory = {"medium": "Memory"} | ({"sizeLimit": cluster["shm"]} if cluster["shm"] else {})
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": memory},
        *({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, claim in enumerate(names)),
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": FILES, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # the default of 64 MiB is too little for NCCL and data loaders
    ]
    for claim, path, read_only in claims:
        mount: Manifest = {"name": f"claim-{names.index(claim)}", "mountPath": path}
        mounts.append(mount | ({"readOnly": True} if read_only else {}))
    container: Manifest = {
        "name": "pytorch" if cluster["kind"] == "pytorchjob" else NODE,  # the only one that its operator fills in
        "image": cluster["image"],
        "command": command(cluster),
        "env": environment(config),
        "resources": resources(cluster),
        "volumeMounts": mounts,
    }
    spec: Manifest = {
        "restartPolicy": "Never",  # the same pod would be started again whatever its exit code is
        "terminationGracePeriodSeconds": cluster["grace_s"] + 30,  # after its save, the supervisor ends the trackers
        "containers": [container],
        "volumes": volumes,
    }
    if config["preflight"]["level"] != "off":
        spec["initContainers"] = [container | {"name": "preflight", "command": [*command(cluster), "preflight"]}]
    for setting, field in (
        ("service_account", "serviceAccountName"),
        ("priority_class", "priorityClassName"),
        ("tolerations", "tolerations"),
    ):
        if cluster[setting]:
            spec[field] = cluster[setting]
    if cluster["node_selector"]:
        spec["nodeSelector"] = {key: str(value) for key, value in cluster["node_selector"].items()}
    if cluster["topology"]:
        term = {"topologyKey": cluster["topology"], "labelSelector": {"matchLabels": {RUN_LABEL: name}}}
        spec["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    added = {key: [*spec[key], *value] for key, value in cluster["pod"].items() if isinstance(spec.get(key), list)}
    return dict(over(spec, cluster["pod"] | added))


def command(cluster: dict[str, Any]) -> list[str]:
    return [cluster["python"], "-P", "-m", "dtrain.launch.pod", FILES]  # -P: see dtrain/start.py


def environment(config: dict[str, Any]) -> list[Manifest]:
    """Return the variables of a pod; those that depend on its cores and ranks are set when it starts its ranks."""
    found: list[Manifest] = [{"name": key, "value": value} for key, value in plain_environment(config).items()]
    for variable, secret, key in map(checks.secret_reference, config["cluster"]["secret_env"]):
        found.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return [*found, {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def plain_environment(config: dict[str, Any]) -> dict[str, str]:
    cluster = config["cluster"]
    profile = {name: str(entry["value"]) for name, entry in cluster["fabric"]["env"].items()}
    passed = {TRUST: ",".join(typed_trust())} if typed_trust() else {}
    if is_script(config):
        passed[SCRIPT_TYPED] = identity(config["script"])  # this launch typed it; a run folder is not trusted
    return profile | {str(name): str(value) for name, value in cluster["env"].items()} | passed


def resources(cluster: dict[str, Any]) -> Manifest:
    limits: dict[str, Any] = {name: str(value) for name, value in cluster["resources"].items()}
    requests = {"cpu": str(cluster["cpus"])} if cluster["cpus"] else {}
    if cluster["mem"]:
        requests["memory"] = limits["memory"] = cluster["mem"]
    if cluster["gpus_per_node"]:
        limits["nvidia.com/gpu"] = str(cluster["gpus_per_node"])
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


# ---- compose -------------------------------------------------------------------------------------------------


def compose(config: dict[str, Any], name: str, files: dict[str, Any]) -> Manifest:
    """Return the same run for `docker compose up` or `podman-compose up`: a container for each node, on one machine.

    A variable of cluster.secret_env gets the value that it has in the shell of `docker compose`. The configuration is
    a variable, too: podman-compose does not know files whose content is in the compose file.
    """
    cluster = config["cluster"]
    run_files = {RUN_FILES: dollars(json.dumps(texts_of(config, files), ensure_ascii=False))}
    secrets = {variable: None for variable, _, _ in map(checks.secret_reference, cluster["secret_env"])}
    claims = checks.mounts(cluster["volumes"])
    shared: Manifest = {
        "image": cluster["image"],
        "command": command(cluster),
        "volumes": [f"{claim}:{path}{':ro' if read_only else ''}" for claim, path, read_only in claims],
        "stop_grace_period": f"{cluster['grace_s'] + 30}s",
        "shm_size": str(cluster["shm"] or COMPOSE_SHM).lower().removesuffix("i") + "b",
    }
    limits = {"cpus": str(cluster["cpus"])} if cluster["cpus"] else {}
    if cluster["mem"]:
        limits["memory"] = str(cluster["mem"]).lower().removesuffix("i") + "b"
    if limits:
        shared["deploy"] = {"resources": {"limits": limits}}
    gpus = cluster["gpus_per_node"]
    services = {}
    for rank in range(cluster["nodes"]):
        variables = {key: dollars(value) for key, value in plain_environment(config).items()} | secrets
        services[f"{NODE}-{rank}"] = shared | {"environment": variables | {NODE_RANK: str(rank)} | run_files}
        if gpus:  # each container its own
            mine = [str(gpu) for gpu in range(rank * gpus, (rank + 1) * gpus)]
            device = {"driver": "nvidia", "device_ids": mine, "capabilities": ["gpu"]}
            services[f"{NODE}-{rank}"] |= {
                "deploy": over(shared.get("deploy", {}), {"resources": {"reservations": {"devices": [device]}}})
            }
    made = {
        "name": name,
        "services": services,
        "volumes": {claim: {} for claim, _, _ in claims},
    }
    redaction.check(made)
    return made


def dollars(text: str) -> str:
    """Escape what compose would replace by variables of the shell."""
    return text.replace("$", "$$")


# ---- text ----------------------------------------------------------------------------------------------------


def to_yaml(*documents: Any) -> str:
    """Return yaml that every parser reads as the same values: texts that could be anything else are quoted."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """A subclass, because a representer added to PyYAML's own class would affect every user of it."""

        def ignore_aliases(self, data: Any) -> bool:
            return True  # anchors are valid, but hard to read

    def text(dumper: Any, value: str) -> Any:
        plain = re.fullmatch(r"[A-Za-z/_][\w./-]+", value, re.ASCII)  # PyYAML quotes the words true, no, off …
        style = "|" if "\n" in value else None if plain else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**31 - 1))


def launch_record(config: dict[str, Any], job_id: str) -> dict[str, Any]:
    """Return a launch.json for pods that are started from a printed manifest, not by dtrain."""
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:32]
    launch = {"cluster": config["cluster"], "choices": config["choices"], "job_id": job_id}
    return {"id": digest, "command": "kubectl apply", "launches": [launch]}
