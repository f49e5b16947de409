"""`astraflow dev`: supervises the daemons, an embedded Valkey and a local weight store."""
