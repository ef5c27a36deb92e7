"""Layers timed on the device that is there."""
