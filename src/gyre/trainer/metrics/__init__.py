"""Throughput, traces, and what a trainer reports at startup."""
