"""What a finished build is: its files, verdicts and receipts, and the statements that attest them."""
