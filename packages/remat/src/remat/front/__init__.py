"""The two ways in: `rematerialize`, and the back end for `torch.compile`."""
