"""Ready-made workflows that recipes name as `astraflow_raas.workflows.<module>:<Name>`."""
