"""Small models, and what real training loops do with them."""
