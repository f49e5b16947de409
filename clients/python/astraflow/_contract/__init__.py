"""What the contracts say beside names and types: options of rpcs, and bounds of fields with their checks."""
