"""Weight versions: announced once, told in order to everybody who listens."""
