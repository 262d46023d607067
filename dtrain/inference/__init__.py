"""Using a finished run: generate text, export weights."""
