"""Ready-made data plug-ins that recipes name as `astraflow_dataflow.plugins.<room>.<module>:<Name>`."""
