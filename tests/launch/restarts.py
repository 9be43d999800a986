"""What launch/loop.sh says."""

OVER = (0, 1, 2, 3, 130)
