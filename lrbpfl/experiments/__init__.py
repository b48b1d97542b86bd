"""A run as a directory: its configuration, its data, its record."""
