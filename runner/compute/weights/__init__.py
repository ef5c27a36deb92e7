"""Weights: read, cut into shards, brought to the form that a device multiplies fastest."""
