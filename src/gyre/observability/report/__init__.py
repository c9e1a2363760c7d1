"""One HTML page from a run's events."""
