"""The controller: the training loop, over contracts."""
