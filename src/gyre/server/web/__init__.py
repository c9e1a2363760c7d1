"""Web: the page in which people use the server from a browser."""
