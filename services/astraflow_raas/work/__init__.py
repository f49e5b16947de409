"""Leased work: leases, the episodes they become, and the session that runs them."""
