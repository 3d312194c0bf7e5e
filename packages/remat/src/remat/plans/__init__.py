"""A plan: what it promises, its file, and where it fits."""
