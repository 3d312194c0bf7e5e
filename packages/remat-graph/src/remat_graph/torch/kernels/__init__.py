"""Functions that run in a program as operators do."""
