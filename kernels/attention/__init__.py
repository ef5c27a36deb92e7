"""Attention: Triton kernels over cached and new tokens with their references, and the CPU's own."""
