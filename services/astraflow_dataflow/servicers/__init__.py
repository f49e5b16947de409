"""The gRPC edge: one servicer per service, translating between protobuf and the domain, nothing more."""
