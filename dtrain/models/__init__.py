"""Plain modules that carry the plans only they can know."""
