"""Where a step's time and memory go: recorded in the ranks, turned into a table, printed by `dtrain profile RUN`."""
