"""What ends a call to a worker that hangs."""
