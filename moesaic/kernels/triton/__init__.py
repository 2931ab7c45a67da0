"""Kernels in Triton. Each has a torch twin, of the same name and signature, in moesaic.kernels."""
