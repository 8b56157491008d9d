"""Target layers: the positions of the slots in their caches, and the code that writes them."""
