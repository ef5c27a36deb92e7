"""The nouns: model, cluster, profile, schedule, bound, plan, and the batches that a schedule runs."""
