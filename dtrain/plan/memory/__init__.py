"""How much memory a rank needs."""
