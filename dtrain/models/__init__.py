"""Plain modules, with the parallelism plans that only the model can know."""
