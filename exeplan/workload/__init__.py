"""What requests look like: lengths, their laws, arrivals and deadlines."""
