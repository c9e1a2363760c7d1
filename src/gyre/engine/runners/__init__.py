"""Run one step on a device: plain torch, C kernels on CPU, Triton kernels on GPU."""
