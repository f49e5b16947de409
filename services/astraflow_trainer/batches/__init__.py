"""A batch on its way to the step: acquired, fetched as rows, shared among ranks, packed."""
