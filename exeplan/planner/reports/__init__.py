"""A plan in words and tables: the report, explanations, differences and pictures."""
