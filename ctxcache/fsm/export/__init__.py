"""The lifecycles drawn: pictures, a page and data, made from the declared tables and from nothing else.

Bottom up: `drawing` (a lifecycle, beside what a comparison says of it), `edges` (rows that are drawn as one arrow), `picture`
(the text on the arrows, whatever draws them), then one module a format, and `diagram` with `export` on top.

May import `errors`, `fsm.declaration`, `fsm.points`, `fsm.table`, `ids`.
"""
