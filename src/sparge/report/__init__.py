"""`sparge report`: what sparse attention does inside a model, as one page to look at."""
