"""Communication: the fabric's profile as environment variables, and the preflight that checks nodes before a run."""
