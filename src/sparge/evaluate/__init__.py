"""Quality on real models: the models, and what is measured on them."""
