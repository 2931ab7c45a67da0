"""The `moesaic` command. Modules here import torch only once they have work for it."""
