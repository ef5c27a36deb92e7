"""Looks for a better plan while a service runs, and carries it out."""
