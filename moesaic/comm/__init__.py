"""How ranks reach each other: collective groups, one-sided memory, and ranks on this machine."""
