"""The record of every answer, from the router to the ledger."""
