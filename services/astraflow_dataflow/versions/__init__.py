"""Weight versions: announced once, sent in order to everybody who listens."""
