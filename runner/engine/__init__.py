"""Requests in, tokens out: the loop around the scheduler, and the executor of one device."""
