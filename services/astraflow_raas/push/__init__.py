"""Finished episodes on their way to the server, kept on disk until they are durable."""
