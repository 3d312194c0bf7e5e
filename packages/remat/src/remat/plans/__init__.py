"""A plan as data: what it promises, its file, and where it fits."""
