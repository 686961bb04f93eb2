"""One request, from what its caller says to its release.

Said (`admission`), checked (`validation`), looked up and leased (`lookup`), laid out over slots (`batch`) and over the device
(`device_binding`), moved by the lifecycle (`request`), published (`publication_policy`), held and ended (`custody`), or
kept after a failed drain (`quarantine`).

May import `arguments`, `config`, `device`, `errors`, `fsm`, `ids`, `interrupts`, `jit`, `keys`, `manager`, `metrics`.
"""
