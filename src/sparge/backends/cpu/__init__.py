"""The CPU engine: skips blocks for real, both stages, on every core. Needs llvmlite (the `cpu` extra)."""
