"""Where the tensors of a model lie on ranks, and the fewest bytes that bring them from one layout to another."""
