"""Runs: what is known of one from its timestamps, with intervals, and how fast the machine was meanwhile."""
