"""Results as people read them."""
