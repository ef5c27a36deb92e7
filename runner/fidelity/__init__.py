"""Runs against their plans: what was predicted, what was measured, and what the difference is made of."""
