"""Engines run the work of clients: a map over clients, and the round loop, written once."""
