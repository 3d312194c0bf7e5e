"""What the rematerialized model keeps of the model it came from: submodules, hooks, classes."""
