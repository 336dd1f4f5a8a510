"""`policyline ledger replay RUN --into URL`: serve a run's versions again, one after another.

Each goes the way it would go on a sidecar (fetch, verify, load from its own path, list, probe), and
its probe is compared with the one that was recorded when it was acked. The ledger is only read.
"""
