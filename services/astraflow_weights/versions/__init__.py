"""What is in a store's log: manifests, paths, records, how to read them and get from one version to another."""
