"""Scripts that measure. A package, as fairscale installs one of the same name, which a mere folder would lose to."""
