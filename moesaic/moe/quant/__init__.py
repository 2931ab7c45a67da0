"""Quantised numbers: of what travels between ranks (payload) and of the experts' weights."""
