"""Foreign plug-ins: what a recipe names that is no part of this release runs in a process of its run."""
