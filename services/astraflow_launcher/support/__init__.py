"""When something is wrong: checks of the machine, the support bundle."""
