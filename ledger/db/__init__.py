"""The databases: schema, connections, locks, signals, and their errors in our words."""
