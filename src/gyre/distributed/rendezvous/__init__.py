"""Rendezvous: texts that a run's processes share when they share no memory, in one order."""
