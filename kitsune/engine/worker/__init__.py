"""A second process that tries faster forms of captured programs, beside the training."""
