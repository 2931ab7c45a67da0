"""Speculative decoding: what proposes tokens that steps verify."""
