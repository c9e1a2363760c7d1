"""Gateway: who may ask the server, how much, and how a request may arrive."""
