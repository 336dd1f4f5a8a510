"""What the demo needs: a tiny model, adapters, and the fleet around them."""
