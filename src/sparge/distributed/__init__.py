"""Attention over a sequence that several ranks share: Ulysses, ring, and both together."""
