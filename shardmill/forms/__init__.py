"""In which form each matrix of a model is stored: what forms there are, and recipes that choose among them."""
