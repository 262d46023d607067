"""`dtrain verify`: prove that every strategy computes the same as one process."""
