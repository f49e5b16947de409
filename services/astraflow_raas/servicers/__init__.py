"""gRPC services of the node: thin translations into the objects that do the work."""
