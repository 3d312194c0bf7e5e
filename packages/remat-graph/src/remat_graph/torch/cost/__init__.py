"""What operators take: time and memory, measured or estimated, and the layouts that they give."""
