"""Unmodified trainers behind the router: what they load is published."""
