"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, fed with what `metrics.jsonl` gets."""
