"""Will it fit, and how to serve it."""
