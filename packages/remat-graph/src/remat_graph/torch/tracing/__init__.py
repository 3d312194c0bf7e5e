"""Tracing by AOTAutograd: what it is given, and the joint graph that comes of it."""
