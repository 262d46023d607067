"""SLURM's own rejections, explained."""

import pytest

from dtrain.checks.slurm import refused

NO_CONFIGURATION = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
NO_CONTROLLER = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"


@pytest.mark.parametrize("answer", [NO_CONFIGURATION, NO_CONTROLLER])
def test_no_slurm_is_reachable(answer: str) -> None:
    said = str(refused(answer, {}))
    assert said.startswith("cluster: no SLURM is reachable from this machine (sbatch: ") and "sinfo" not in said
    assert said.count("error") == 0 and "\n  fix: cluster=local, or " in said


def test_a_rejection_of_a_reachable_slurm() -> None:
    assert "cluster.partition=x" in str(refused("sbatch: error: invalid partition specified: x", {"partition": "x"}))
