"""Real clients of the field, unpatched, in front of the real proxy; run with ``make clients``."""
