"""Questions: the state of the ledger, now and as of any event."""
