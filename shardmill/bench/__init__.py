"""Speed of a built model, measured through its server: one request at a time, every drafter against T = 1."""
