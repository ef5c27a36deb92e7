"""From a profile, a workload and bounds to a plan, its explanation, and its comparison with others."""
