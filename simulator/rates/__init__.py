"""Closed forms of schedules to which requests come at a rate, and of the times of single requests."""
