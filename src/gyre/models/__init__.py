"""Model definitions, one per family, shared by the trainer and the engine."""
