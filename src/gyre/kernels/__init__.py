"""Fast operations, each next to its plain PyTorch oracle."""
