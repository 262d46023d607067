"""Profiles: every cluster's yaml, the user's environment wins, and what NCCL would misread is refused."""

from __future__ import annotations

import copy
import os
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.commands import env
from dtrain.config.files import CONF
from dtrain.config.hardware import Hardware
from dtrain.launch.compose import compose
from dtrain.preflight import network_env

PROFILES = ("gcp-ethernet", "infiniband", "aws-ib", "aws-efa")
CONFIGS = {name: compose([f"cluster={name}"]) for name in ("slurm", "local", *PROFILES)}


def changed(cluster: str, **fabric: Any) -> dict[str, Any]:
    """A cluster's configuration with other settings of its fabric; env adds to the profile's own variables."""
    config = copy.deepcopy(CONFIGS[cluster])
    env = {name: entry if isinstance(entry, dict) else {"value": entry, "why": "a test"}
           for name, entry in fabric.pop("env", {}).items()}  # fmt: skip
    config["cluster"]["fabric"].update(fabric)
    config["cluster"]["fabric"]["env"].update(env)
    return config


def values(config: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, str]:
    return {e.name: e.value for e in network_env.exports(config, environ or {})}


# ---- the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CONFIGS])
def test_every_variable_has_a_reason_and_the_rules_hold(name: str) -> None:
    config = CONFIGS[name]
    network_env.check(config)
    assert all(export.why.strip() and export.value.strip() for export in network_env.exports(config, {}))
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in values(config)


def test_ethernet_uses_exactly_its_interface() -> None:
    config = compose(["cluster=gcp-ethernet", "cluster.fabric.interface=ens5"])
    found = values(config)
    assert found["NCCL_SOCKET_IFNAME"] == "=ens5" and found["GLOO_SOCKET_IFNAME"] == "ens5"
    assert found["NCCL_IB_DISABLE"] == "1" and found["NCCL_NET"] == "Socket"
    assert config["hardware"]["gpu"] == "A100" and config["preflight"]["level"] == "quick"


def test_infiniband_names_adapters_exactly_and_levels_by_name() -> None:
    found = values(CONFIGS["aws-ib"])
    assert found == values(CONFIGS["infiniband"])
    assert found["NCCL_IB_HCA"].startswith("=mlx5_0,") and found["NCCL_NET_GDR_LEVEL"] == "PXB"
    assert not {"NCCL_IB_GID_INDEX", "NCCL_IB_PCI_RELAXED_ORDERING"} & set(found)


def test_efa_leaves_the_plugin_alone() -> None:
    assert not [name for name in values(CONFIGS["aws-efa"]) if name.startswith(("NCCL_IB_", "FI_", "NCCL_PROTO"))]


@pytest.mark.parametrize("path", sorted((CONF / "hardware").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_hardware_can_be_chosen(path: Any) -> None:
    section = compose([f"hardware={path.stem}"])["hardware"]
    made = Hardware(**{k: v for k, v in section.items() if k != "_target_"})
    assert made.gpu is None or (made.source and made.peak_bf16_tflops)


def test_a_hardware_figure_is_positive() -> None:
    with pytest.raises(ValueError, match=r"hardware.memory_gb_s=0.*\n  fix: hardware.memory_gb_s=null"):
        Hardware(memory_gb_s=0)


# ---- what holds everywhere -----------------------------------------------------------------------------------


def test_threads_follow_the_cores_where_they_are_known() -> None:
    config = copy.deepcopy(CONFIGS["slurm"])
    assert "OMP_NUM_THREADS" not in values(config)
    assert values(config, {"SLURM_CPUS_ON_NODE": "96"})["OMP_NUM_THREADS"] == "12"
    config["cluster"]["cpus_per_task"] = 6
    assert values(config)["OMP_NUM_THREADS"] == "6"


def test_tensor_parallel_and_gpus_have_their_variables() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in values(CONFIGS["slurm"])
    assert values(compose(["cluster=slurm", "strategy=tensor", "strategy.tp=2"]))["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert values(CONFIGS["slurm"])["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in values(compose(["cluster=slurm", "cluster.gpus_per_node=0"]))


NAMES = [e.name for e in network_env.exports(CONFIGS["gcp-ethernet"], {})]
printable = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@given(st.dictionaries(st.sampled_from([*NAMES, "HOME", "NCCL_OTHER"]), printable))
def test_the_users_environment_always_wins(environ: dict[str, str]) -> None:
    config = CONFIGS["gcp-ethernet"]
    added = network_env.environment(config, environ)
    assert not set(added) & set(environ) and set(NAMES) <= set(added) | set(environ)
    differing = {e.name: e.theirs for e in network_env.exports(config, environ) if e.theirs is not None}
    assert differing == {n: v for n, v in environ.items() if n in NAMES and v != values(config)[n]}
    assert len(network_env.differences(config, environ)) == len(differing)


def test_a_difference_says_whose_value_and_why() -> None:
    (line,) = network_env.differences(CONFIGS["infiniband"], {"NCCL_IB_DISABLE": "1"})
    assert line.startswith("NCCL_IB_DISABLE=1 (yours) instead of 0: InfiniBand stays on")


# ---- dtrain env ----------------------------------------------------------------------------------------------


def test_a_shell_can_eval_the_exports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO\nexport NCCL_NET=evil")
    assert env.main(["cluster=gcp-ethernet"]) == 0
    text = capsys.readouterr().out
    shell = subprocess.run(
        ["bash", "-c", f"set -eu\n{text}\nenv -0"], capture_output=True, env={"PATH": os.environ["PATH"]}
    )
    assert shell.returncode == 0, shell.stderr
    found = dict(item.split("=", 1) for item in shell.stdout.decode().split("\0") if "=" in item)
    expected = values(CONFIGS["gcp-ethernet"])
    expected.pop("NCCL_DEBUG")
    assert expected.items() <= found.items() and "NCCL_DEBUG" not in found
    assert all(line.startswith(("# ", "export ")) for line in text.splitlines())


@given(printable)
def test_quoting_survives_a_shell(value: str) -> None:
    import shlex

    assert shlex.split(network_env.quote(value)) == [value]
    assert not network_env.quote(value).startswith("=")  # zsh would look for a program of that name


# ---- the rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "fabric", "says"),
    [
        ("gcp-ethernet", {"env": {"NCCL_SOCKET_NTHREADS": "17"}}, "from 1 to 16"),
        ("gcp-ethernet", {"env": {"NCCL_SOCKET_NTHREADS": "many"}}, "from 1 to 16"),
        ("gcp-ethernet", {"env": {"NCCL_NSOCKS_PERTHREAD": "17"}}, "68 connections, and NCCL allows 64"),
        ("infiniband", {"env": {"NCCL_NET_GDR_LEVEL": "2"}}, r"changed their meaning.*\n.*=PXB"),
        ("infiniband", {"env": {"NCCL_NET_GDR_LEVEL": 5}}, r"changed their meaning.*\n.*=SYS"),
        ("infiniband", {"env": {"NCCL_NET_GDR_LEVEL": "near"}}, "must be one of LOC, PIX"),
        ("gcp-ethernet", {"env": {"NCCL_SOCKET_IFNAME": "^docker0"}}, r"so that lo could be chosen\n.*\^docker,lo"),
        ("gcp-ethernet", {"env": {"NCCL_SOCKET_IFNAME": "^lo"}}, "so that docker could be chosen"),
        ("gcp-ethernet", {"env": {"GLOO_SOCKET_IFNAME": "=eth0"}}, "gloo accepts only plain names"),
        ("gcp-ethernet", {"env": {"nccl_debug": "WARN"}}, "capital letters"),
        ("gcp-ethernet", {"env": {"WANDB_API_KEY": "x"}}, "looks like a secret"),
        ("gcp-ethernet", {"env": {"LD_PRELOAD": "evil.so"}}, "must not be set by a network profile"),
        ("gcp-ethernet", {"env": {"MASTER_ADDR": "x"}}, "must not be set by a network profile"),
        ("gcp-ethernet", {"env": {"NCCL_X": "a\nb"}}, "control characters"),
        ("gcp-ethernet", {"env": {"NCCL_X": {"value": "1"}}}, "exactly a value and a why"),
        ("gcp-ethernet", {"env": {"NCCL_X": {"value": "1", "why": " "}}}, "must say why"),
        ("gcp-ethernet", {"env": {"NCCL_X": True}}, "text or a whole number"),
        ("aws-efa", {"env": {"NCCL_IB_HCA": "mlx5"}}, "AWS offers no InfiniBand"),
        ("aws-efa", {"env": {"FI_PROVIDER": "efa"}}, "obsolete"),
        ("aws-efa", {"env": {"NCCL_PROTO": "simple"}}, "disables the faster"),
        ("aws-efa", {"env": {"NCCL_NET": "Socket"}}, "contradicts cluster.fabric.transport=efa"),
        ("infiniband", {"env": {"NCCL_IB_DISABLE": "1"}}, "contradicts"),
        ("gcp-ethernet", {"interface": "=eth0"}, "without = or"),
        ("gcp-ethernet", {"interface": "eth0; reboot"}, "exact name of one"),
        ("infiniband", {"hca": "^mlx5_3"}, "exact names of InfiniBand"),
        ("gcp-ethernet", {"transport": "tcp"}, "must be one of socket, ib, efa"),
    ],
)  # fmt: skip
def test_a_rule_is_said_with_a_fix(cluster: str, fabric: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        network_env.check(changed(cluster, **fabric))
    assert "\n  fix: " in str(caught.value)


def test_allowed_forms_pass() -> None:
    network_env.check(changed("aws-efa", env={"FI_EFA_USE_HUGE_PAGE": "0"}))
    network_env.check(changed("gcp-ethernet", env={"NCCL_SOCKET_IFNAME": "^docker,lo", "NCCL_SOCKET_NTHREADS": 16}))
    network_env.check(changed("gcp-ethernet", env={"NCCL_SOCKET_IFNAME": "^=docker0,lo"}))
    network_env.check(CONFIGS["local"])


def test_an_interface_that_is_not_given_cannot_be_made_into_variables() -> None:
    with pytest.raises(ValueError, match=r"cluster.fabric.interface=null: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"):
        compose(["cluster=gcp-ethernet", "cluster.fabric.interface=null"])


@settings(max_examples=200)
@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.text(max_size=6), st.fixed_dictionaries(
    {"value": st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none()), "why": st.text(max_size=8)}
)), max_size=3))  # fmt: skip
def test_whatever_passes_the_rules_can_be_exported(env: dict[str, Any]) -> None:
    config = copy.deepcopy(CONFIGS["slurm"])
    config["cluster"]["fabric"]["env"] = env
    try:
        network_env.check(config)
    except ValueError as error:
        assert "\n  fix: " in str(error)
        return
    for export in network_env.exports(config, {}):
        assert export.name.isupper() and export.name.isascii()
        assert len(f"{export.value}|{export.why}".splitlines()) == 1


def test_a_mistake_on_the_command_line_is_explained() -> None:
    with pytest.raises(ValueError, match=r"cluster=gcp: there is no such option\n  fix: .*gcp-ethernet"):
        compose(["cluster=gcp"])
    with pytest.raises(ValueError, match="is not a setting"):
        compose(["--help"])
