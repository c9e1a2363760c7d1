"""Checkpoint folders in hub layout: found, validated, read, written."""
