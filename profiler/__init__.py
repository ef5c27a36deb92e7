"""Profiles: seconds of layers, embedding, head and overhead; measured, derived from a datasheet, or imported."""
