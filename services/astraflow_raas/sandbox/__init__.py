"""How untrusted programs run: in bubblewrap, without network, files of the host or a way to the verdict."""
