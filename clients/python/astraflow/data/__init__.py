"""Task data in files, or drawn, for data sets of recipes."""
