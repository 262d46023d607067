"""Faults to inject into a real run: `dtrain chaos`, the tests and the benchmarks of `dtrain why` use the same ones."""
