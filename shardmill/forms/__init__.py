"""The stored form of each matrix of a model: the available forms, and recipes that choose among the forms."""
