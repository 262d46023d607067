"""Distributed training where one word changes the parallelism and nothing else changes."""

__version__ = "0.1.0"
