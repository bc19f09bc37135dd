"""What ``bench.py`` is made of; not installed."""
