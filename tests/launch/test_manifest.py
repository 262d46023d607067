"""Manifests for Kubernetes and compose: valid for the published schemas, free of secrets, the same in every parser."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.checks import kubernetes as checks
from dtrain.config.files import yaml_loader
from dtrain.launch import manifest
from dtrain.launch.compose import plain_config
from dtrain.runs.protocol import RUN_FILES
from tests.kubernetes_schemas import problems
from tests.patience import patience
from tests.world import ROOT, summary

KINDS = ["job", "jobset", "pytorchjob", "trainjob"]
SECRET = "planted-Zq7-secret"
NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
TEXTS = st.text("abzAZ019 .:/-_=$'\"#{}[]é→", max_size=20)
VALUES = st.one_of(
    TEXTS, st.integers(), st.booleans(), st.sampled_from(["1e3", "0x10", "y", "no", "null", "~", "2026-11-18"])
)
VARIABLES = st.from_regex(r"[A-Z][A-Z_0-9]{0,15}", fullmatch=True).filter(lambda n: not checks.SECRET_NAME.search(n))
LABELS = st.from_regex(
    r"([a-z0-9]{1,8}(\.[a-z0-9]{1,8}){0,2}/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,10}[A-Za-z0-9])?", fullmatch=True
)
QUANTITIES = st.from_regex(r"[1-9][0-9]{0,3}(Ki|Mi|Gi|Ti|M|G)?", fullmatch=True)
TOLERATIONS = st.fixed_dictionaries(
    {"key": LABELS, "operator": st.sampled_from(["Exists", "Equal"])},
    optional={"effect": st.sampled_from(["NoSchedule", "NoExecute"]), "tolerationSeconds": st.integers(0, 999)},
)
PODS = st.fixed_dictionaries(
    {},
    optional={
        "hostNetwork": st.booleans(),
        "imagePullSecrets": st.lists(st.fixed_dictionaries({"name": NAMES}), max_size=2),
        "securityContext": st.fixed_dictionaries({"runAsUser": st.integers(0, 2**31)}),
        "volumes": st.just([{"name": "more", "emptyDir": {}}]),
    },
)
CLUSTERS = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 4096),
        "gpus_per_node": st.integers(0, 16),
        "image": st.from_regex(r"[a-z]{1,9}(\.[a-z]{2,3}/[a-z]{1,9})?(:[a-z0-9.]{1,9})?", fullmatch=True),
        "namespace": NAMES,
        "cpus": st.integers(1, 512),
        "mem": QUANTITIES,
        "shm": QUANTITIES,
        "resources": st.dictionaries(
            st.sampled_from(["rdma/hca", "vpc.amazonaws.com/efa", "hugepages-2Mi"]), QUANTITIES
        ),
        "env": st.dictionaries(VARIABLES, VALUES, max_size=4),
        "secret_env": st.lists(st.builds("{}:{}/{}".format, VARIABLES, NAMES, NAMES), max_size=3),
        "service_account": NAMES,
        "priority_class": NAMES,
        "node_selector": st.dictionaries(LABELS, st.one_of(NAMES, st.integers(0, 99), st.booleans()), max_size=3),
        "tolerations": st.lists(TOLERATIONS, max_size=3),
        "topology": LABELS,
        "pod": PODS,
        "ttl_s": st.one_of(st.none(), st.integers(0, 10**6)),
        "max_restarts": st.integers(0, 99),
        "grace_s": st.integers(0, 10**5),
    },
)
EXTRA = st.lists(
    st.builds("{}:/m/{}{}".format, NAMES, NAMES, st.sampled_from(["", ":ro"])),
    max_size=3,
    unique_by=lambda v: v.split(":")[1],
)


@functools.cache
def base() -> dict[str, Any]:
    overrides = [
        "cluster=kubernetes",
        "cluster.image=dtrain:1",
        "cluster.volumes=[training:/data]",
        "run_dir=/data/run",
    ]
    config = plain_config([*overrides, "cluster.processes=1"])
    return {
        key: config[key] for key in ("cluster", "preflight", "name", "run_dir", "choices")
    }  # few: it takes less time


def made_of(kind: str, cluster: dict[str, Any], extra: list[str], name: str, level: str) -> dict[str, Any]:
    config = copy.deepcopy(base()) | {"name": name}
    config["cluster"] |= {"kind": kind, **cluster}
    config["cluster"]["volumes"] = ["training:/data", *extra]
    if kind == "compose":
        config["cluster"]["nodes"] %= 5  # on one machine
    if kind == "pytorchjob":
        config["cluster"]["max_restarts"] = 0
    config["preflight"]["level"] = level
    return config


def documents(config: dict[str, Any]) -> list[dict[str, Any]]:
    checks.check(config["cluster"])
    name = manifest.job_name(config, 1)
    files = {"launch.json": manifest.launch_record(config, f"job/x/{name}")}
    if config["cluster"]["kind"] == "compose":
        return [manifest.compose(config, name, files)]
    return manifest.manifests(config, name, files)


def small_environment(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """Leave only a secret in the environment, which is searched for each text of a manifest."""
    base()  # composed before
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv(secret, SECRET)


COUNTS = [15, pytest.param(500, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [*KINDS, "compose"])
def test_they_are_valid_for_the_published_schemas(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_environment(monkeypatch, "WANDB_API_KEY")

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CLUSTERS, EXTRA, TEXTS, st.sampled_from(["off", "quick"]))
    def check(cluster: dict[str, Any], extra: list[str], name: str, level: str) -> None:
        made = documents(made_of(kind, cluster, extra, name, level))
        for document in made:
            assert not problems(document, "compose" if kind == "compose" else None)
        text = manifest.to_yaml(*made)
        assert list(yaml.load_all(text, yaml_loader())) == made
        assert SECRET not in text and SECRET not in json.dumps(made)

    check()


@pytest.mark.parametrize("kind", ["trainjob", "compose"])
def test_a_planted_secret_is_refused_wherever_it_stands(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_environment(monkeypatch, "SOME_TOKEN")
    places = ("env", "node_selector", "image", "tolerations", "pod", "name", "annotation", "fabric")

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CLUSTERS, st.sampled_from(places), TEXTS)
    def check(cluster: dict[str, Any], place: str, around: str) -> None:
        value = around + SECRET
        planted = {
            "env": {"env": {"HARMLESS": value}},
            "node_selector": {"node_selector": {"zone": value}},
            "image": {"image": value},
            "tolerations": {"tolerations": [{"key": "x", "value": value}]},
            "pod": {"pod": {"hostname": value}},
            "annotation": {"pod": {"nodeName": value}},
            "fabric": {"fabric": {"env": {"NCCL_DEBUG": {"value": value, "why": "x"}}}},
            "name": {},
        }[place]
        config = made_of(kind, cluster | planted, [], value if place == "name" else "run", "quick")
        try:
            made = documents(config)
        except ValueError as error:
            assert SECRET not in str(error) or place in ("node_selector",)
            return
        assert SECRET not in manifest.to_yaml(*made)

    check()


def test_a_secret_like_variable_is_only_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = made_of("job", {"secret_env": ["WANDB_API_KEY:wandb/key"]}, [], "run", "off")
    _, job = documents(config)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    reference = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}
    assert reference in container["env"]
    config["cluster"] |= {"env": {"HF_TOKEN": "hf-x"}}
    with pytest.raises(ValueError, match=r"cluster\.env=HF_TOKEN: looks like a secret"):
        documents(config)
    config["cluster"] |= {"env": {}, "secret_env": ["WANDB_API_KEY:0123456789abcdef"]}
    with pytest.raises(ValueError, match="must be VARIABLE:SECRET/KEY") as refused:
        documents(config)
    assert "0123456789" not in str(refused.value)  # it may be the secret itself


def test_what_a_pod_has() -> None:
    cluster = {
        "nodes": 2, "gpus_per_node": 8, "shm": "16Gi", "grace_s": 100, "max_restarts": 3, "cpus": 64, "mem": "400Gi",
        "fabric": {"env": {"NCCL_SOCKET_IFNAME": {"value": "=eth0", "why": "x"}}}, "topology": "rack",
        "pod": {"hostNetwork": True, "volumes": [{"name": "more", "emptyDir": {}}]},
    }  # fmt: skip
    shared, job = documents(made_of("job", cluster, ["sets:/sets:ro"], "My Run!", "quick"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["backoffLimit"] == 3
    by_action = [(r["action"], r.get("onExitCodes", {}).get("values")) for r in spec["podFailurePolicy"]["rules"]]
    assert by_action == [("FailJob", [2, 4]), ("Ignore", [75]), ("Ignore", None)]
    (container,), (init,) = pod["containers"], pod["initContainers"]
    assert container["resources"]["limits"] == {"memory": "400Gi", "nvidia.com/gpu": "8"}
    assert container["resources"]["requests"] == {"cpu": "64", "memory": "400Gi"}
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "=eth0"} in container["env"]
    assert init["command"] == [*container["command"], "preflight"]
    assert pod["terminationGracePeriodSeconds"] >= 100 and pod["hostNetwork"] is True
    mounted = {m["mountPath"]: m for m in container["volumeMounts"]}
    assert mounted["/sets"]["readOnly"] and "readOnly" not in mounted["/data"]
    by_name = {v["name"]: v for v in pod["volumes"]}
    assert by_name[mounted["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert by_name["more"] == {"name": "more", "emptyDir": {}} and len(by_name) == 5
    assert yaml.safe_load(shared["data"]["config.yaml"])["run_dir"] == "/data/run"
    assert job["metadata"]["name"].startswith("my-run-")


def test_compose_has_a_container_for_each_node() -> None:
    cluster = {"nodes": 2, "gpus_per_node": 2, "secret_env": ["HF_TOKEN:hub/token"], "env": {"A": "$x"}}
    (made,) = documents(made_of("compose", cluster, [], "run", "off"))
    first, second = made["services"]["node-0"], made["services"]["node-1"]
    assert (first["environment"]["DTRAIN_NODE_RANK"], second["environment"]["DTRAIN_NODE_RANK"]) == ("0", "1")
    assert first["environment"]["HF_TOKEN"] is None and first["environment"]["A"] == "$$x"
    assert second["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["2", "3"]
    sent = json.loads(second["environment"][RUN_FILES].replace("$$", "$"))
    assert yaml.safe_load(sent["config.yaml"])["cluster"]["env"] == {"A": "$x"}
    assert json.loads(sent["launch.json"])["id"]


@pytest.mark.slow
def test_the_containers_of_compose_train_together(tmp_path: Path) -> None:
    """As processes with the variables of their containers: compose itself was run by hand, docs/kubernetes.md."""
    folder = str(tmp_path / "data")
    options = ["model=convnet", "model.width=4", "model.image_size=8", "data=digits", "train.steps=4"]
    options += ["train.eval_batches=0", "strategy=fsdp"]
    cluster = ["cluster=kubernetes", "cluster.kind=compose", "cluster.image=x", "cluster.nodes=2"]
    cluster += ["cluster.processes=1", f"cluster.volumes=[runs:{folder}]", f"cluster.run_root={folder}"]
    config = plain_config([*options, *cluster])
    (made,) = documents(config)
    threads = {"OMP_NUM_THREADS": "1"}  # else torchrun chooses by the ranks of a node, and the last bits differ
    pods = []
    for service in made["services"].values():
        command = [sys.executable, *service["command"][1:-1], str(tmp_path / "not-mounted")]
        variables = {name: value.replace("$$", "$") for name, value in service["environment"].items()}
        pods.append(subprocess.Popen(command, env=os.environ | threads | variables, cwd=ROOT))
    assert [pod.wait(patience(120)) for pod in pods] == [0, 0]
    (run_dir,) = Path(folder).glob("*/*")
    local = [sys.executable, "launch.py", *options, "cluster.processes=2", f"run_dir={tmp_path / 'local'}"]
    launched = subprocess.run(local, env=os.environ | threads, cwd=ROOT)
    assert launched.returncode == 0 and summary(run_dir)["strategy"] == "fsdp"
    assert summary(run_dir)["weights_sha256"] == summary(tmp_path / "local")["weights_sha256"]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"image": None}, "need a container image"),
        ({"volumes": ["training:data"]}, "must be CLAIM:PATH"),
        ({"volumes": ["a:/data", "b:/data"]}, "something else is mounted at /data"),
        ({"volumes": ["training:/data:ro"]}, "below a volume that the pods can write to"),
        ({"volumes": []}, "below a volume"),
        ({"run_root": "/elsewhere"}, "below a volume"),
        ({"run_root": "/data/../etc"}, "below a volume"),
        ({"mem": "400 GB"}, "must be a quantity"),
        ({"node_selector": {"zone": "a b"}}, "must be a label"),
        ({"tolerations": [{"keys": "x"}]}, "each must be a mapping"),
        ({"pod": {"containers": []}}, "is set by dtrain"),
        ({"resources": {"nvidia.com/gpu": 1}}, "without a setting of its own"),
        ({"kind": "pytorchjob", "max_restarts": 1}, "PyTorchJob does not count restarts"),
    ],
)
def test_bad_settings_are_refused(cluster: dict[str, Any], words: str) -> None:
    config = copy.deepcopy(base())
    config["cluster"] |= cluster
    with pytest.raises(ValueError, match=words) as refused:
        documents(config)
    assert "\n  fix: " in str(refused.value)


def test_a_first_launch_has_one_fix() -> None:
    """It names the image and the volume, and works."""
    config = copy.deepcopy(base()) | {"run_dir": "/here/outputs/run"}
    for typed in ({"image": None}, {"image": "dtrain:1"}, {"image": None, "run_root": "/data"}):
        config["cluster"] |= {"volumes": [], "run_root": None, **typed}
        with pytest.raises(ValueError, match="volume") as refused:
            documents(config)
        fix = str(refused.value).partition("  fix: ")[2]
        assert ("cluster.image=NAME:TAG" in fix) == (typed["image"] is None)
        assert "'cluster.volumes=[training:/data]'" in fix
        assert ("cluster.run_root=/data" in fix) == ("run_root" not in typed)
        config["cluster"] |= {"image": "dtrain:1", "volumes": ["training:/data"], "run_root": "/data"}
        assert documents(config)
