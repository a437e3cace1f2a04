"""Two small vision models, trained as subjects for sparse attention: a video and an image transformer."""
