"""Matrix products: linear layers in 32, 16, 8 and 4 bits, and the experts of a mixture."""
