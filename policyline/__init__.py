"""The command: composition root, command line, engines for tests and demo, the demo itself."""
