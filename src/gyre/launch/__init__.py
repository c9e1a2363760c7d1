"""Names in the config become objects: the only room that names concrete classes."""
