"""Hopper's own attention kernel: TMA, warp specialisation, asynchronous tensor cores."""
