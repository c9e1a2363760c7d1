"""Finds layouts that fit named GPUs, and how fast they should be."""
