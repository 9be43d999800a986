"""Instructions of a compiled program that compute nothing."""

LINKS = ("get-tuple-element", "tuple", "parameter", "constant", "while", "call", "bitcast", "opt-barrier")
"""Instructions that only refer to the results of others."""
