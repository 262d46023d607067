"""Measure this machine, so that plans match it."""
