"""The FFN kernels: a readable torch reference and a fast numba version of the same few functions."""
