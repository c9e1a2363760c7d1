"""Triton kernels for CUDA devices. Imported only where a CUDA device is used."""
