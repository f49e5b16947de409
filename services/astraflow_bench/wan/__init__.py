"""`astraflow bench wan`: a publisher, a store and two nodes on links of a real rate and round trip, in one machine."""
