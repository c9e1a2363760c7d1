"""Decides each step: sequences, batch slots, preemption, and the accounting of what was sampled."""
