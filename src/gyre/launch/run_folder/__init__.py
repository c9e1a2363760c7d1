"""The files of a run folder, and its attempts."""
