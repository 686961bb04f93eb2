"""`ctxcache bench host` beside other engines' own code, on the same core, in turns."""
