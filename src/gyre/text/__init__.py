"""Between messages and tokens."""
