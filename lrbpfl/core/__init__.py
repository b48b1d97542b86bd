"""Low-rank Gaussian masks on any network: the maths, and nothing else."""
