"""Measures one layer, embedding, head and the fixed overhead of an iteration on the device that is there -> Profile."""
