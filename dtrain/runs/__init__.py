"""The run folder: the protocol of launcher and ranks, records of runs, finding runs. No torch."""
