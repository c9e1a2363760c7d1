"""Heartbeats of workers, and what ends a call to a dead one."""
