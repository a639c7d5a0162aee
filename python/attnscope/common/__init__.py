"""The ground that every other part stands on; it imports no other part."""
