"""Image and video transformers of diffusers."""
