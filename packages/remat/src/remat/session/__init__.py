"""One training loop under one budget: regions, what a step of them holds, by which plan it runs."""
