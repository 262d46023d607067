"""Data: one file per kind; each class has `dataset("train" | "val")`, `vocab_size`, `encode`, `decode`."""
