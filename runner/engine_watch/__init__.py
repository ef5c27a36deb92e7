"""Beside a server of another engine: whether its plan is still the right one, by the metrics that it shows.

readings.py     what an engine's metrics say of the requests between two moments
sidecar.py      the watch of the plan over such readings, and what follows from a proposal
dashboard.py    what the sidecar shows to Prometheus, and a dashboard for Grafana
"""
