"""From a command line to running ranks: Hydra, run folder, local and SLURM launchers, supervisor. No torch."""
