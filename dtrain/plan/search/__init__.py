"""Find the best layout."""
