"""Python: `gyre.Engine`, a model in the process of its user."""
