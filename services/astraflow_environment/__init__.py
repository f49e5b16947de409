"""The environment service: what episodes act in, served by processes of its own to nodes of any run."""
