"""Times derived from a device's datasheet, and what a serving engine adds to its kernels."""
