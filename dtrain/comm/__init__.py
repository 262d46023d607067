"""What strategies send: collectives, compression, a ring all-reduce, a parameter server."""
