"""Passes: a batch as tensors over the KV cache, paged or packed, and decodes as CUDA graphs."""
