"""`sparge bench-models`: whole models of true size, dense and sparse, with random weights and a forced sparsity."""
