"""What a measured node is started with: no code of the product."""
