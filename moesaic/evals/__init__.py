"""Evaluation: asks an engine or a server problems and grades the replies."""
