"""Gray failures: a table of faults that are no clean death, and the driver that lives a run through them."""
