"""Questions: what the ledger says, now and as of any event."""
