"""Optimizers, learning-rate schedules, precision."""
