"""Task data in files, for data sets of recipes."""
