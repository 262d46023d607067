"""Does it fit, how fast, at what cost, which strategy: answered before anything is queued, without torch."""
