"""Running calls slice by slice: which may, along which axes, and how slices make up the whole."""
