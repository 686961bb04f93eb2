"""The plain-Python twin of the manager: the same answers, and none of the cleverness.

May import `config`, `errors`, `ids`, `manager`, `metrics`.
"""
