"""Many devices: worker processes, the links between them, and the hosts that start them."""
