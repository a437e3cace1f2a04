"""Models of transformers: the attention and mask functions that they call, and what a patch changes in them."""
