"""From a module or a region and one call of it to a `Capture`."""
