"""Shards, links and control of several devices, timed between real processes."""
