"""What happened, when, and how long: events, metrics, sinks, the report."""
