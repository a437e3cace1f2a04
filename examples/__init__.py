"""Runnable examples; from the checkout, as in python -m examples.train.train."""
