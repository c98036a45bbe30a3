"""What the precision of products' inputs costs, on a fixed text of the demo model."""
