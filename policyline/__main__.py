"""`python -m policyline`: the command, for a process that must run this very interpreter."""

from __future__ import annotations

from policyline.cli import main

if __name__ == "__main__":
    main()
