"""The test suite: ``pytest`` runs all of it, on a machine with or without a GPU."""
