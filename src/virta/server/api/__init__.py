"""The ASGI application: control routes and the descriptions of the API."""
