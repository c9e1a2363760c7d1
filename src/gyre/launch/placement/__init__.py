"""Where a stage's parts run: in this process, or in workers on Ray."""
