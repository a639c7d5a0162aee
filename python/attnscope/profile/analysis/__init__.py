"""Tables, figures and findings of one recording."""
