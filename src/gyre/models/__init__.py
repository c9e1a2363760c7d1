"""One definition per family, for the trainer and for the engine."""
