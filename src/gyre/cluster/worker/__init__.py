"""What runs in a worker process, and how it is called."""
