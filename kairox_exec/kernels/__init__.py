"""The FFN kernels: a readable torch reference, and the same few functions fast, in numba."""
