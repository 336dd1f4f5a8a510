"""Pure decisions: what to do next, from what is desired and observed."""
