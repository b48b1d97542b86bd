"""A client's own model as a thing to keep: files, predictions, cards, new clients."""
