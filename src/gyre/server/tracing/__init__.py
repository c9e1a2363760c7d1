"""Traces of served requests: marks while they run, spans when they have ended."""
