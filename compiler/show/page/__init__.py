"""The report of a plan: one page that opens without a network."""
