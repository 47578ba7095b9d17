"""How few bits each matrix can do with: quantisers, what each choice costs, and the search for the best set."""
