"""From a graph to one that computes the same in fewer, or in more independent, operators."""
