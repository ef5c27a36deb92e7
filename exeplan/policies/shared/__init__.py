"""What several policies share: laws of their steady states, and rules of their batches. No policy itself."""
