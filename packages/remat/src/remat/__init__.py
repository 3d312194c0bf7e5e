"""Train PyTorch models in less memory: a budget in bytes, the same gradients, a certified plan."""
