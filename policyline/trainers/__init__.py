"""For unmodified trainers behind the router: publishes the adapters they load."""
