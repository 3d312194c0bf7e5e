"""The two ways in: a model that is called by plans, and a back end for `torch.compile`."""
