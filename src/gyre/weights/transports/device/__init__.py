"""Device transports: parts that are read from the device of their publisher."""
