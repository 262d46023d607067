"""Data: one file per kind; each class gives `dataset("train" | "val")`, `vocab_size`, `encode`, `decode`."""
