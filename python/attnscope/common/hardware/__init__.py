"""GPUs: peaks, sensors and occupancy."""
