"""`dtrain search`: the space, the algorithms (optuna, ASHA, PBT), and the runs that they start."""
