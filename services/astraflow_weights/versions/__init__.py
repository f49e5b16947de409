"""What is in a store's log: manifests, ways, records, how to read them and get from one version to another."""
