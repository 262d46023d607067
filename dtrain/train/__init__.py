"""The training loop and what surrounds it in a rank."""
