"""How fast a built model is: measured through its server, one request at a time, every drafter against T = 1."""
