"""The configuration: reading, schema, ranges, trust rules, and building objects from it. No torch."""
