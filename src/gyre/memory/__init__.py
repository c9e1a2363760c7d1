"""Who may hold how many bytes of device memory, in which phase."""
