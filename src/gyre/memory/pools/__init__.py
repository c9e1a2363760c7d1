"""Storage behind components: on the device, in host memory, on disk."""
