"""The border to the network: connections, names, keys, clients and the processes that read requests."""
