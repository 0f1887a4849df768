"""Kitsune's own Triton kernels, as operators that a graph can hold. They are imported without Triton."""
