"""Payloads outside the server's Redis: on a second Redis or in an object store, in packs of one commit each."""
