"""C kernels for the CPU, built on first use with the system's compiler; without one, torch does the
same work."""
