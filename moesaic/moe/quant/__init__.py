"""Number formats of payloads between ranks and of the experts' weights."""
