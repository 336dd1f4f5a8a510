"""Appending: one transaction for an event, its fold and what follows from it."""
