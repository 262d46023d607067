"""Will it fit, how fast, what does it cost, which strategy: answered before anything is queued, without torch."""
