"""Check the nodes before a run: GPUs, network, versions, speed."""
