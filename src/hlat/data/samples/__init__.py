"""Training samples: global sample index -> tokens, a pure function of the data and the seed."""
