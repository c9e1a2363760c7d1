"""The processes in which rewards are computed."""
