"""Models: what a transformer is by its config, and what its layers weigh, compute and send; no weights here."""
