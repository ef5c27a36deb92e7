"""The point of a grid with the most throughput within its limits; knows no policy and no model."""
