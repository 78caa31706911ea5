"""The ledger of a request: what it waited for and what it cost, as one record for the answer, the log, spans and the live page."""
