"""A training step as regions: the graphs that TorchDynamo finds, under one budget."""
