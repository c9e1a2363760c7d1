"""Fast operations, each beside its plain PyTorch oracle."""
