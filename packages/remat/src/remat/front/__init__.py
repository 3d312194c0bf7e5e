"""The model that `rematerialize` gives back, and what a module must be for it."""
