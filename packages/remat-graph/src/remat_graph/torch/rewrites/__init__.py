"""Passes over a joint graph, between tracing and lowering."""
