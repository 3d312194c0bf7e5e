"""Hierarchical partitioning of training graphs."""
