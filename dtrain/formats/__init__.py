"""External file formats, read with size limits and without torch."""
