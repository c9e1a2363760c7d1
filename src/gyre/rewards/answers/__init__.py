"""Reads and compares short answers: numbers, units, options."""
