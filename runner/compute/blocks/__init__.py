"""Blocks: what the layers of model families are made of."""
