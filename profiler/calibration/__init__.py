"""Profiles corrected by measured serving runs: reading and predicting runs, and what their errors change."""
