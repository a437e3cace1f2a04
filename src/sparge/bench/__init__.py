"""`sparge bench`: speed against the other attentions of this machine, in one run, each result checked first."""
