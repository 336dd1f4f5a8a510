"""The record of every answer, on its way from the router to the ledger."""
