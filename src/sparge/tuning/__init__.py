"""The search for settings per layer and head: `search.py` is the whole of it, the other files are its steps."""
