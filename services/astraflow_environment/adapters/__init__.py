"""Which environments of other libraries can be acted in as they are? Each needs an extra of its own."""
