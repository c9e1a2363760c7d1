"""The controller: the one ring, over contracts."""
