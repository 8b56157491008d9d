"""What a target layer is: where its cache's slots lie, and who writes them."""
