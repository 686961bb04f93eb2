"""One request from admission to release, in host terms. May import `manager`, `fsm`, `device` and what lies below."""
