"""Bodies: what requests may say, and how each is read and refused."""
