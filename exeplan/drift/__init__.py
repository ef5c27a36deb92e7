"""Is the plan still the right one for the traffic? Pure functions of what was observed."""
