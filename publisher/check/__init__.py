"""Checks of an adapter before a byte of it is published."""
