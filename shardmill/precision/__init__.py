"""The precision of each matrix: quantisers, the cost of each form, and the search for the best set of forms."""
