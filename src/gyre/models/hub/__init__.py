"""Checkpoint folders in hub layout: find, validate, read, write."""
