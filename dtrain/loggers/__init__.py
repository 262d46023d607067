"""Trackers: TensorBoard, W&B, MLflow, Trackio, CSV. A follower reads a run's files and feeds them; ranks know none."""
