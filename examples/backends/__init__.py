"""MoE backends outside the package: docs/add_a_backend.md walks through them."""
