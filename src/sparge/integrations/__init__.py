"""Models that people already have: sparge in place of their own attention."""
