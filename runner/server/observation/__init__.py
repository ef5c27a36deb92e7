"""What the server observes, beside what its plan predicts."""
