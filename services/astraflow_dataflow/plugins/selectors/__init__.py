"""Ready-made selectors: they decide which ready groups a step takes."""
