"""Fork server: one warm process that forks, watches, kills and reaps children for a client."""
