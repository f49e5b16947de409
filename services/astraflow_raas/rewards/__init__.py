"""Ready-made rewards that recipes name as `astraflow_raas.rewards.<module>:<Name>`."""
