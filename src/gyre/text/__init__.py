"""Conversion between messages and tokens."""
