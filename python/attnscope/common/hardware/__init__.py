"""Cards: their peaks, their sensors, and how many warps they hold."""
