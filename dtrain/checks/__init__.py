"""Every rule that rejects a configuration, checked before anything starts and without torch."""
