"""The portable GPU backend: plain Triton kernels for every NVIDIA GPU since Ampere."""
