"""Which exit codes launch/loop.sh answers with another start."""

OVER = (0, 1, 2, 3, 130)
"""After these nothing starts again."""
