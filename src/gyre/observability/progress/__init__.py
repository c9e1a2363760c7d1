"""Terminal display of a running run."""
