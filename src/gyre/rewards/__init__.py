"""From text to a number with a reason."""
