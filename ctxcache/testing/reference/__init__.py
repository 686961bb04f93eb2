"""The plain-Python twin of the manager."""
