"""One file per strategy: how the model is spread over the ranks."""
