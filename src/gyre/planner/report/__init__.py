"""A plan in words and tables."""
