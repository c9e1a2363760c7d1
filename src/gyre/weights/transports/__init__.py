"""Ways for the bytes of a version to reach an engine."""
