"""Runs and judges tests of code."""
